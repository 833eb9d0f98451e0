//! Random numbers by place rather than by order: every draw has a generator of its own, seeded by the hash of what it
//! is for. So a change of one part of a workload moves no draw of another.

use rand_pcg::Pcg64;

/// What a draw is for. The numbers are part of every generated trace: never reuse or change one.
#[derive(Clone, Copy)]
pub(super) enum Stream {
    Gap = 1,
    Regime = 2,
    Prompt = 3,
    Phases = 4,
    Tenant = 5,
    TenantScale = 6,
    Class = 7,
    Turns = 8,
    TurnGap = 9,
    FollowUp = 10,
    Split = 11,
}

#[derive(Clone, Copy)]
pub(super) struct Streams {
    seed: u64,
}

impl Streams {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The generator of the `turn`-th draw of the `index`-th thing.
    pub(super) fn rng(self, stream: Stream, index: u64, turn: u32) -> Pcg64 {
        let mut hash = mix(self.seed);
        for part in [stream as u64, index, u64::from(turn)] {
            hash = mix(hash ^ part);
        }
        let wide = |salt: u64| (u128::from(mix(hash ^ salt)) << 64) | u128::from(mix(hash ^ salt ^ u64::MAX));
        Pcg64::new(wide(1), wide(2))
    }
}

/// One step of SplitMix64 (Steele et al., OOPSLA 2014): a bijection that changes half of the bits for any changed bit.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
