//! What a run may ask for, so that a slip of the keyboard is refused before memory is taken for it.

use std::fmt::Display;
use std::ops::RangeInclusive;

use anyhow::ensure;

/// Most engines behind a router. One takes some 150 kB before its first request.
pub const ENGINES: RangeInclusive<u32> = 1..=1024;
/// Fewest and most KV blocks of an engine: 4 million hold 67 million tokens in blocks of 16.
pub const KV_BLOCKS: RangeInclusive<u32> = 2..=1 << 22;
/// Most KV blocks of all engines together. A block takes about 80 bytes while it is empty.
pub const ALL_KV_BLOCKS: u64 = 1 << 23;
/// Tokens of a KV block.
pub const BLOCK_TOKENS: RangeInclusive<u32> = 1..=1 << 20;
/// Running requests of an engine.
pub const NUM_SEQS: RangeInclusive<u32> = 1..=1 << 20;
/// Tokens of a step.
pub const BATCHED_TOKENS: RangeInclusive<u32> = 1..=1 << 24;
/// Requests of a run. One takes about 100 bytes before it arrives.
pub const REQUESTS: RangeInclusive<usize> = 1..=2_000_000;
/// Candidates of one timed decision.
pub const CANDIDATES: RangeInclusive<usize> = 1..=1 << 16;
/// Runs of one replay: policies times rates times seeds.
pub const RUNS: RangeInclusive<usize> = 1..=10_000;

/// Whether a value is within its limits.
///
/// ```
/// use meridian_bench::limits::{ENGINES, within};
///
/// let error = within("--engines", 100_000, &ENGINES).unwrap_err();
/// assert_eq!(error.to_string(), "--engines 100000: expected 1 to 1024");
/// ```
///
/// # Errors
/// What was given, and what was expected.
pub fn within<T: PartialOrd + Display>(named: &str, value: T, limits: &RangeInclusive<T>) -> anyhow::Result<T> {
    ensure!(limits.contains(&value), "{named} {value}: expected {} to {}", limits.start(), limits.end());
    Ok(value)
}

/// Whether so many engines of so many KV blocks each are within the limits.
///
/// # Errors
/// What was given, and what was expected.
pub fn engines_within(engines: u32, kv_blocks: u32) -> anyhow::Result<()> {
    within("--engines", engines, &ENGINES)?;
    let all = u64::from(engines) * u64::from(kv_blocks);
    ensure!(
        all <= ALL_KV_BLOCKS,
        "--engines {engines}: {all} KV blocks, {kv_blocks} in each: expected at most {ALL_KV_BLOCKS} in all"
    );
    Ok(())
}
