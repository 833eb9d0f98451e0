//! What is asked of rows of logits, and what they answer.

/// The state of EAT for one request: exponential moving mean and variance of the entropies of its probes.
///
/// `M_0 = x_0`, `V_0 = 0`, then `M_i = a x_i + (1 - a) M_(i-1)` and `V_i = a (x_i - M_i)^2 + (1 - a) V_(i-1)`, with the
/// updated mean (arXiv 2509.26522). In nats and nats squared. All zero is a request that was not probed yet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EatState {
    /// `M_i`.
    pub mean: f32,
    /// `V_i`.
    pub variance: f32,
    /// Probes so far, those whose row was no distribution not counted.
    pub probes: u32,
}

impl EatState {
    /// After one more probe. An entropy that is no number leaves the state as it is.
    #[must_use]
    pub fn observed(self, entropy: f32, alpha: f32) -> Self {
        if entropy.is_nan() {
            return self;
        }
        if self.probes == 0 {
            return Self { mean: entropy, variance: 0.0, probes: 1 };
        }
        let mean = alpha * entropy + (1.0 - alpha) * self.mean;
        let off = entropy - mean;
        let variance = alpha * off * off + (1.0 - alpha) * self.variance;
        Self { mean, variance, probes: self.probes.saturating_add(1) }
    }
}

/// What one row of logits `x` says, with `p = softmax(x / T)`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowStats {
    /// `-sum p ln p`, nats. NaN when the row is no distribution: only `-inf`, or a NaN or `+inf` in it.
    pub entropy: f32,
    /// The largest logit, as it is in memory: not divided by `T`. NaN when the row is no distribution.
    pub max: f32,
    /// `ln sum exp(x / T)`. NaN when the row is no distribution.
    pub logsumexp: f32,
    /// `p` of the token that was asked for. NaN when none was, or the row is no distribution.
    pub probability: f32,
    /// The first token with the largest logit; -1 when the row is no distribution.
    pub top: i32,
    /// For the row of a probe, its request's state with this row taken in; all zero otherwise.
    pub eat: EatState,
}

/// Of which rows, with which temperature, and the probability of which token.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'a> {
    /// Rows of the matrix, in the order of the answers; `None` for all of them.
    pub rows: Option<&'a [u32]>,
    /// For each of these rows a token whose probability is wanted.
    pub tokens: Tokens<'a>,
    /// For each of these rows its `T`, finite and above 0; empty for 1.
    pub temperatures: &'a [f32],
}

/// Tokens whose probability is wanted, one a row; a token that is not in the vocabulary, such as -1, for none.
#[derive(Clone, Copy, Debug, Default)]
pub enum Tokens<'a> {
    /// Of no row.
    #[default]
    None,
    /// In the machine's memory; copied before the launch returns.
    Host(&'a [i32]),
    /// In the memory of the logits' device, ordered before the launch as the logits are; not for the CPU.
    Device(*const i32),
}

/// Rows that are probes of EAT, and where the states of their requests are.
#[derive(Clone, Copy, Debug)]
pub struct Probes<'a> {
    /// For each row asked for the slot of its request in `states`, each slot once; -1 for a row that is no probe.
    pub slots: &'a [i32],
    /// Weight of the newest entropy, in (0, 1].
    pub alpha: f32,
    /// [`EatState`]s in the memory of the logits' device. Launches on one device take them in one after the other.
    pub states: *mut EatState,
    /// How many there are.
    pub len: usize,
}
