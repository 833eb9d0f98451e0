//! `[service_levels.NAME]`: what an operator promises the requests of a class.

use std::collections::{BTreeMap, HashSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{check, joined};
use crate::Error;

/// The service levels by name.
pub type ServiceLevels = BTreeMap<String, ServiceLevel>;

/// Most service levels, and the longest name, characters: names are labels of metrics.
const MOST_LEVELS: usize = 64;
const MOST_NAME_CHARS: usize = 64;
/// The longest name of a tenant that a request may have, characters.
const MOST_TENANT_CHARS: usize = 128;

/// What the requests of one class are promised, and which requests these are.
///
/// ```
/// use meridian_core::MeridianConfig;
/// use meridian_core::config::Late;
///
/// let config = MeridianConfig::from_toml("[service_levels.chat]\nttfo_ms = 3000\ntenants = ['web']")?;
/// let chat = &config.service_levels["chat"];
/// assert_eq!((chat.ttfo_ms, chat.tpot_ms, chat.late), (3000.0, 50.0, Late::Last));
/// let error = MeridianConfig::from_toml("[service_levels.chat]\nttfo = 3000").unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "service_levels.chat.ttfo: unknown field, did you mean `service_levels.chat.ttfo_ms`?"
/// );
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ServiceLevel {
    /// Longest time from arrival to the first token of the answer, milliseconds, for a request without a prompt and without
    /// thinking; the next two fields add to it.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub ttfo_ms: f32,
    /// Milliseconds that each token of the prompt adds.
    #[schemars(range(min = 0))]
    pub prompt_ms_per_token: f32,
    /// Milliseconds that each token of thinking adds.
    #[schemars(range(min = 0))]
    pub think_ms_per_token: f32,
    /// Longest mean time between two tokens of the answer, milliseconds.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub tpot_ms: f32,
    /// Importance of a request beside those of other levels: a wait counts so many times.
    #[schemars(range(max = 1000), extend("exclusiveMinimum" = 0))]
    pub weight: f32,
    /// What becomes of a request whose level cannot be kept any more.
    pub late: Late,
    /// Longest time from arrival to the first token of the answer that a policy may cause, milliseconds: when just that is
    /// left, the host puts the request first, as far as seats and KV memory allow. At least `ttfo_ms`, and longer than a
    /// backlog takes to clear: late requests that must go first make those late that arrive next.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub longest_wait_ms: f32,
    /// Part of the engine's tokens that requests of this level get at least while any of them waits, whatever a policy says: the
    /// host puts one that waits first while the level had less in the last seconds, as far as seats and KV memory allow. 0 for
    /// none; at most 1 for all levels together.
    #[schemars(range(min = 0, max = 1))]
    pub least_share: f32,
    /// Tenants whose requests have this level.
    #[schemars(extend("x-must-be" = "names of at most 128 characters, each in one level only"))]
    pub tenants: Vec<String>,
    /// LoRA adapters whose requests have this level, or the served model, for requests without one.
    #[schemars(extend("x-must-be" = "names, each in one level only"))]
    pub models: Vec<String>,
    /// The first and the last of the priorities whose requests have this level.
    #[schemars(extend("x-must-be" = "two integers, the lower first, or empty; apart from those of other levels"))]
    pub priorities: Vec<i32>,
    /// Whether a client may ask for this level by its name. It may in any case name one of its tenants.
    pub claimable: bool,
    /// Whether requests have this level that no other one names.
    #[schemars(extend("x-must-be" = "true in one level at most"))]
    pub default: bool,
}

impl Default for ServiceLevel {
    fn default() -> Self {
        Self {
            ttfo_ms: 5000.0,
            prompt_ms_per_token: 0.5,
            think_ms_per_token: 50.0,
            tpot_ms: 50.0,
            weight: 1.0,
            late: Late::Last,
            longest_wait_ms: 3_600_000.0,
            least_share: 0.0,
            tenants: Vec::new(),
            models: Vec::new(),
            priorities: Vec::new(),
            claimable: false,
            default: false,
        }
    }
}

/// `late`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Late {
    /// It goes after all whose level can still be kept.
    #[default]
    Last,
    /// The same, but one that was never admitted ends at once, while others run.
    Refuse,
    /// It keeps its place.
    Serve,
}

/// Check what one level says of another.
pub(super) fn check_levels(levels: &ServiceLevels) -> Result<(), Error> {
    check("service_levels", levels.len(), levels.len() <= MOST_LEVELS, || {
        format!("must be at most {MOST_LEVELS} levels")
    })?;
    let (mut tenants, mut models) = (HashSet::new(), HashSet::new());
    let mut ranges: Vec<[i32; 2]> = Vec::new();
    let mut default = None;
    let mut shares = 0.0f64;
    for (name, level) in levels {
        let table = joined("service_levels", name);
        let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        let is_name = !name.is_empty() && name.len() <= MOST_NAME_CHARS && name.chars().all(is_word);
        check(&table, name, is_name, || format!("must be named by 1 to {MOST_NAME_CHARS} of A-Z, a-z, 0-9, _ and -"))?;
        let ServiceLevel { ttfo_ms, longest_wait_ms, priorities, .. } = level;
        check(format!("{table}.longest_wait_ms"), longest_wait_ms, longest_wait_ms >= ttfo_ms, || {
            format!("must be at least its ttfo_ms, {ttfo_ms}")
        })?;
        shares += f64::from(level.least_share);
        // Ten tenths are all.
        check(format!("{table}.least_share"), level.least_share, shares <= 1.0 + 1e-6, || {
            "must be at most 1 for all levels together".into()
        })?;
        for name in &level.tenants {
            let is_name = (1..=MOST_TENANT_CHARS).contains(&name.chars().count());
            check(format!("{table}.tenants"), format!("{name:?}"), is_name && tenants.insert(name), || {
                format!("must be names of at most {MOST_TENANT_CHARS} characters, each in one level only")
            })?;
        }
        for name in &level.models {
            check(format!("{table}.models"), format!("{name:?}"), !name.is_empty() && models.insert(name), || {
                "must be names, each in one level only".into()
            })?;
        }
        let range = match priorities[..] {
            [] => None,
            [first, last] if first <= last => Some([first, last]),
            _ => {
                return check(format!("{table}.priorities"), format!("{priorities:?}"), false, || {
                    "must be two integers, the lower first, or empty".into()
                });
            }
        };
        if let Some([first, last]) = range {
            let apart = ranges.iter().all(|[from, to]| last < *from || first > *to);
            check(format!("{table}.priorities"), format!("{priorities:?}"), apart, || {
                "must be apart from those of other levels".into()
            })?;
            ranges.push([first, last]);
        }
        if level.default
            && let Some(other) = default.replace(name)
        {
            return check(format!("{table}.default"), true, false, || {
                format!("must be true in one level at most, and {other} has it")
            });
        }
    }
    Ok(())
}
