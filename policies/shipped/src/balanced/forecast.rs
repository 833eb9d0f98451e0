//! How many tokens a request will generate, from what its tenant's requests have generated.
//!
//! Candidates have no identity, so lengths are not seen: tokens are counted for each tenant, and requests that have generated
//! their first. Over time, the one over the other is the mean length.

/// The host numbers tenants up to 65,536, 0 is none; any other number counts as the last of these.
const MAX_TENANTS: usize = (1 << 16) + 1;
/// With so many requests counted, the counts are halved, so that a tenant may change.
const REQUESTS: f32 = 256.0;
/// The same with so many tokens: beyond 2^24 an `f32` does not count on.
const TOKENS: f32 = 8_388_608.0;
/// A tenant counts as if so many average requests of all tenants had been its own; and all tenants as if one request of
/// `FIRST_TOKENS` had been.
const AVERAGE_REQUESTS: f32 = 4.0;
const FIRST_TOKENS: f32 = 1000.0;
/// Precedes everything else in a snapshot.
const SNAPSHOT_VERSION: u8 = 1;
const COUNT_BYTES: usize = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    tokens: f32,
    requests: f32,
}

impl Count {
    fn served(&mut self, is_first: bool) {
        self.tokens += 1.0;
        self.requests += f32::from(u8::from(is_first));
        if self.requests > REQUESTS || self.tokens > TOKENS {
            self.tokens *= 0.5;
            self.requests *= 0.5;
        }
    }
}

/// Mean lengths.
#[derive(Clone, Debug, Default)]
pub(crate) struct Forecast {
    all: Count,
    /// By the tenant's number, as far as one was seen.
    tenants: Vec<Count>,
}

/// A NaN counts as none.
fn position(tenant: f32) -> usize {
    (tenant as usize).min(MAX_TENANTS - 1)
}

impl Forecast {
    /// A request of the tenant generated tokens in a step; whether they were its first.
    pub(crate) fn served(&mut self, tenant: f32, is_first: bool) {
        let position = position(tenant);
        if position >= self.tenants.len() {
            self.tenants.resize(position + 1, Count::default());
        }
        self.tenants[position].served(is_first);
        self.all.served(is_first);
    }

    /// Tokens that a request of the tenant will generate.
    #[inline]
    pub(crate) fn tokens(&self, tenant: f32) -> f32 {
        let mean = (self.all.tokens + FIRST_TOKENS) / (self.all.requests + 1.0);
        let own = self.tenants.get(position(tenant)).copied().unwrap_or_default();
        (own.tokens + AVERAGE_REQUESTS * mean) / (own.requests + AVERAGE_REQUESTS)
    }

    /// A version, then a count each: of all, then of the tenants.
    pub(crate) fn snapshot(&self) -> Vec<u8> {
        let mut state = Vec::with_capacity(1 + (1 + self.tenants.len()) * COUNT_BYTES);
        state.push(SNAPSHOT_VERSION);
        for count in std::iter::once(&self.all).chain(&self.tenants) {
            state.extend(count.tokens.to_le_bytes());
            state.extend(count.requests.to_le_bytes());
        }
        state
    }

    pub(crate) fn restored(state: &[u8]) -> Result<Self, String> {
        let Some((&SNAPSHOT_VERSION, counts)) = state.split_first() else {
            return Err(format!("state: expected version {SNAPSHOT_VERSION}"));
        };
        let (chunks, tenants) = (counts.chunks_exact(COUNT_BYTES), counts.len() / COUNT_BYTES);
        if !chunks.remainder().is_empty() || tenants == 0 || tenants > MAX_TENANTS + 1 {
            let bytes = counts.len();
            return Err(format!("state: {bytes} bytes: expected {COUNT_BYTES} for each of 1 to {}", MAX_TENANTS + 1));
        }
        let mut restored = Vec::with_capacity(tenants);
        for chunk in chunks {
            let number = |from: usize| {
                let mut bytes = [0; 4];
                bytes.copy_from_slice(&chunk[from..from + 4]);
                f32::from_le_bytes(bytes)
            };
            let count = Count { tokens: number(0), requests: number(4) };
            if !(0.0..=TOKENS).contains(&count.tokens) || !(0.0..=REQUESTS).contains(&count.requests) {
                let Count { tokens, requests } = count;
                return Err(format!(
                    "state: {tokens} tokens of {requests} requests: expected at most {TOKENS} of {REQUESTS}"
                ));
            }
            restored.push(count);
        }
        let all = restored.remove(0);
        Ok(Self { all, tenants: restored })
    }
}
