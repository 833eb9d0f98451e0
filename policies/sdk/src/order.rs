/// `value` in `least..=most`; NaN counts as `most`. Comparisons, not `f32::clamp`: that one is a library call in WebAssembly.
///
/// For keys of several parts: a part that is kept below the step of the part before it cannot overrule it.
///
/// ```
/// use meridian_policy_sdk::clamped;
///
/// assert_eq!([-3.0, 0.5, f32::NAN].map(|value| clamped(value, 0.0, 1.0)), [0.0, 0.5, 1.0]);
/// ```
#[inline(always)]
#[must_use]
pub fn clamped(value: f32, least: f32, most: f32) -> f32 {
    if value < least {
        least
    } else if value < most {
        value
    } else {
        most
    }
}
