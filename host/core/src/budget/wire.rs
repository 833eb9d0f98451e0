//! The messages between the scheduling process and the sampling process: fixed records, little-endian, any number of
//! them in a message. A message may contain anything, so readers skip invalid records.

/// The scheduler's orders about a request.
///
/// ```
/// use meridian_core::budget::Order;
///
/// let orders = [Order::Limit { key: 7, from: 12, max_think_tokens: 0 }, Order::Gone { key: 7 }];
/// let mut message = Vec::new();
/// orders.iter().for_each(|order| order.write(&mut message));
/// assert_eq!(message.len(), 2 * Order::BYTES);
/// assert!(Order::read_all(&message).eq(orders));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Set this limit from `from` generated tokens on; 0 ends the thinking there. See
    /// [`Enforcer::limit_from`](super::Enforcer::limit_from).
    Limit {
        /// The request.
        key: u64,
        /// Generated tokens.
        from: u32,
        /// Think tokens.
        max_think_tokens: u32,
    },
    /// Whether to measure the entropy of its tokens, from now on.
    Measure {
        /// The request.
        key: u64,
        /// Whether to measure.
        on: bool,
    },
    /// The request has ended: the sampler can forget it.
    Gone {
        /// The request.
        key: u64,
    },
}

impl Order {
    /// Size of a record.
    pub const BYTES: usize = 17;

    /// Append the record.
    pub fn write(&self, out: &mut Vec<u8>) {
        let (tag, key, from, max_think_tokens) = match *self {
            Self::Limit { key, from, max_think_tokens } => (0u8, key, from, max_think_tokens),
            Self::Gone { key } => (1, key, 0, 0),
            Self::Measure { key, on } => (2, key, u32::from(on), 0),
        };
        out.push(tag);
        out.extend_from_slice(&key.to_le_bytes());
        out.extend_from_slice(&from.to_le_bytes());
        out.extend_from_slice(&max_think_tokens.to_le_bytes());
    }

    /// The records of a message.
    pub fn read_all(message: &[u8]) -> impl Iterator<Item = Self> {
        message.chunks_exact(Self::BYTES).filter_map(|record| {
            let key = u64::from_le_bytes(array(record, 1));
            match record[0] {
                0 => Some(Self::Limit {
                    key,
                    from: u32::from_le_bytes(array(record, 9)),
                    max_think_tokens: u32::from_le_bytes(array(record, 13)),
                }),
                1 => Some(Self::Gone { key }),
                2 => Some(Self::Measure { key, on: record[9] != 0 }),
                _ => None,
            }
        })
    }
}

/// A measurement at the sampling of a token.
///
/// ```
/// use meridian_core::budget::{Measured, Report};
///
/// let report = Report { key: 7, token: 3, ahead: 0, what: Measured::Probe, entropy_nats: 0.25, confidence: 0.9 };
/// let mut message = Vec::new();
/// report.write(&mut message);
/// assert!(Report::read_all(&message).eq([report]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// The request.
    pub key: u64,
    /// Number of the token that was about to be sampled, among the generated tokens.
    pub token: u32,
    /// Draft tokens of its step before it. The report holds if the request had `token - ahead` tokens before the step;
    /// otherwise the sampler rejected one of these drafts.
    pub ahead: u8,
    /// The subject of the measurement.
    pub what: Measured,
    /// Entropy of its distribution, nats; NaN without a measurement.
    pub entropy_nats: f32,
    /// Probability of its most likely token, of a probe; NaN without one.
    pub confidence: f32,
}

/// The subject of a [`Report`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measured {
    /// A token of the request itself.
    Native,
    /// The same, where an end of sequence was likelier than the end marker that replaced it.
    Guarded,
    /// The token after a forced end of the thinking so far.
    Probe,
}

impl Report {
    /// Size of a record.
    pub const BYTES: usize = 22;

    /// Number of tokens that the request has before the step if the report holds; `None` for an impossible report.
    pub(super) fn begins_at(&self) -> Option<u32> {
        self.token.checked_sub(self.ahead.into())
    }

    /// Append the record.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.push(match self.what {
            Measured::Native => 0,
            Measured::Guarded => 1,
            Measured::Probe => 2,
        });
        out.extend_from_slice(&self.key.to_le_bytes());
        out.extend_from_slice(&self.token.to_le_bytes());
        out.extend_from_slice(&self.entropy_nats.to_le_bytes());
        out.push(self.ahead);
        out.extend_from_slice(&self.confidence.to_le_bytes());
    }

    /// The records of a message.
    pub fn read_all(message: &[u8]) -> impl Iterator<Item = Self> {
        message.chunks_exact(Self::BYTES).filter_map(|record| {
            let what = match record[0] {
                0 => Measured::Native,
                1 => Measured::Guarded,
                2 => Measured::Probe,
                _ => return None,
            };
            Some(Self {
                key: u64::from_le_bytes(array(record, 1)),
                token: u32::from_le_bytes(array(record, 9)),
                what,
                entropy_nats: f32::from_le_bytes(array(record, 13)),
                ahead: record[17],
                confidence: f32::from_le_bytes(array(record, 18)),
            })
        })
    }
}

/// `N` bytes of a whole record.
fn array<const N: usize>(record: &[u8], at: usize) -> [u8; N] {
    record[at..at + N].try_into().expect("a record is whole")
}
