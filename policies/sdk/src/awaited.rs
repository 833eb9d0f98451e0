/// For how long blocks that a waiting request needs are kept, milliseconds: until it is admitted, which ends it.
const AWAITED_MS: f32 = 3.6e6;

/// The key of a block that a waiting request needs since `now_ms`, and for how many milliseconds to keep it: above all keys up
/// to 0, and higher for a request that has waited longer, which is served first.
///
/// ```
/// use meridian_policy_sdk::awaited_since;
///
/// let (first, keep_ms) = awaited_since(1_000.0);
/// let (second, _) = awaited_since(2_000.0);
/// assert!(first > second && second > 0.0 && keep_ms > 0.0);
/// ```
#[must_use]
pub fn awaited_since(now_ms: f64) -> (f32, f32) {
    ((1.0 / (1.0 + now_ms)) as f32, AWAITED_MS)
}
