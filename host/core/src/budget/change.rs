//! Changes of the thresholds of live requests, by the operator.

use serde::{Deserialize, Serialize};

use crate::{Error, RequestTable, RowId, ThinkPhase};

use super::{ClientBudget, ForceReason, ThinkBudgets, Thresholds, check_thresholds};

/// Most think tokens that a change may name; the limit of `scheduler.max_think_tokens`.
const MOST_THINK_TOKENS: u32 = Thresholds::NO_LIMIT;

/// A change of the thinking of live requests: which of them, and their new thresholds. A field that is not set stays as
/// it is. The operator's `scheduler.max_think_tokens` holds as well.
///
/// ```
/// use meridian_core::budget::LiveChange;
///
/// let change = LiveChange::from_json(br#"{"tenant": "batch", "max_think_tokens": 512}"#)?;
/// assert_eq!(change.max_think_tokens, Some(512));
/// let error = LiveChange::from_json(br#"{"all": true, "ema_alpha": 2}"#).unwrap_err();
/// assert_eq!(error.to_string(), "ema_alpha: 2: must be in (0, 1]");
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LiveChange {
    /// The request with this id, as its client knows it or as the engine does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// All requests of this tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// All requests.
    #[serde(skip_serializing_if = "is_false")]
    pub all: bool,
    /// End the thinking at the next token; the same as 0 in `max_think_tokens`.
    #[serde(skip_serializing_if = "is_false")]
    pub end_now: bool,
    /// Return to the thresholds of the client and of the configuration, before the other fields apply.
    #[serde(skip_serializing_if = "is_false")]
    pub reset: bool,
    /// The hard cap, think tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_think_tokens: Option<u32>,
    /// Think tokens before which only the hard cap and an interrupt end thinking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_think_tokens: Option<u32>,
    /// Think tokens between two probes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eat_probe_interval_tokens: Option<u32>,
    /// Weight of the latest probe, in (0, 1].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ema_alpha: Option<f64>,
    /// Variance below which thinking may end, bits squared; 0 turns EAT off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eat_variance_threshold: Option<f64>,
    /// Mean entropy above which thinking does not end, bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eat_max_bits: Option<f64>,
    /// Number (from 0) of the first probe that may end thinking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_probes: Option<u32>,
    /// Tokens in the window of RPDI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rpdi_window: Option<u32>,
    /// Index above which thinking may end; infinite turns RPDI off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rpdi_threshold: Option<f64>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// What a [`LiveChange`] did to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// The new thresholds hold from the next step on.
    Yes,
    /// Its thinking is over, or it never thought.
    Answers,
    /// Its end was ordered already: a sampler may have begun it, so it stays.
    Ends,
}

/// The thinking of one live request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Thinking {
    /// Tokens that it has thought.
    pub think_tokens: u32,
    /// Think tokens before which only the limit and interrupts end it.
    pub min_think_tokens: u32,
    /// Think tokens at which its end is forced.
    pub max_think_tokens: u32,
    /// The reason of the latest end that was ordered or forced.
    pub ends_by: Option<ForceReason>,
}

impl LiveChange {
    /// Read and check a change in JSON.
    ///
    /// # Errors
    /// [`Error::ConfigSyntax`] or [`Error::ConfigValidation`]: the field, its value, and what was expected.
    pub fn from_json(text: &[u8]) -> Result<Self, Error> {
        let mut reader = serde_json::Deserializer::from_slice(text);
        let syntax = |field: String, reason: String| {
            let field = if field == "." { "the body".into() } else { crate::config::one_line(&field) };
            Error::ConfigSyntax { field, reason: crate::config::one_line(&reason) }
        };
        let change: Self = serde_path_to_error::deserialize(&mut reader)
            .map_err(|error| syntax(error.path().to_string(), error.inner().to_string()))?;
        reader.end().map_err(|error| syntax(".".into(), error.to_string()))?;
        change.validate().map(|()| change)
    }

    /// Check that it names requests of one kind and a change, and that the thresholds are in range.
    ///
    /// # Errors
    /// As [`LiveChange::from_json`].
    pub fn validate(&self) -> Result<(), Error> {
        let Self { request, tenant, all, end_now, reset, max_think_tokens, min_think_tokens, .. } = self;
        let named = usize::from(request.is_some()) + usize::from(tenant.is_some()) + usize::from(*all);
        check("request, tenant, all", format!("{named} given"), named == 1, "must be exactly one of them")?;
        for (field, name) in [("request", request), ("tenant", tenant)] {
            let is_name = name.as_ref().is_none_or(|name| !name.is_empty() && name.len() <= 1024);
            let bytes = name.as_ref().map_or(0, String::len);
            check(field, format!("{bytes} bytes"), is_name, "must have 1 to 1024 bytes")?;
        }
        let says = *reset || *end_now || self.has_thresholds();
        check("change", "nothing", says, "must be a threshold, end_now or reset")?;
        let apart = !(*end_now && max_think_tokens.is_some());
        check("end_now", "true", apart, "must be without max_think_tokens, which it sets to 0")?;
        for (field, tokens) in [("max_think_tokens", max_think_tokens), ("min_think_tokens", min_think_tokens)] {
            let tokens = tokens.unwrap_or(0);
            check(field, tokens, tokens <= MOST_THINK_TOKENS, "must be in 0..=16777216")?;
        }
        if let (Some(least), Some(most)) = (min_think_tokens, max_think_tokens) {
            check("min_think_tokens", least, least <= most, "must be at most max_think_tokens")?;
        }
        // The limits of the token counts are above.
        let others = Thresholds { min_think_tokens: 0, max_think_tokens: 1, ..Thresholds::default() };
        let mut client = ClientBudget { min_think_tokens: None, max_think_tokens: None, ..ClientBudget::default() };
        Self { min_think_tokens: None, max_think_tokens: None, end_now: false, ..self.clone() }.apply(&mut client);
        check_thresholds(&client.over(others)).map_err(|error| match error {
            Error::ConfigValidation { field, value, reason } => {
                let field = field.rsplit_once('.').map_or(field.clone(), |(_, name)| name.to_owned());
                Error::ConfigValidation { field, value, reason }
            }
            error => error,
        })
    }

    fn has_thresholds(&self) -> bool {
        let mut client = ClientBudget::default();
        self.apply(&mut client);
        client.max_think_tokens.is_some()
            || client.eat_probe_interval_tokens.is_some()
            || client.has_signals_of_its_own()
    }

    /// Set what is given.
    fn apply(&self, client: &mut ClientBudget) {
        let Self {
            request: _,
            tenant: _,
            all: _,
            reset: _,
            end_now,
            max_think_tokens,
            min_think_tokens,
            eat_probe_interval_tokens,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes,
            rpdi_window,
            rpdi_threshold,
        } = self;
        set(&mut client.max_think_tokens, if *end_now { Some(0) } else { *max_think_tokens });
        set(&mut client.min_think_tokens, *min_think_tokens);
        set(&mut client.eat_probe_interval_tokens, *eat_probe_interval_tokens);
        set(&mut client.ema_alpha, *ema_alpha);
        set(&mut client.eat_variance_threshold, *eat_variance_threshold);
        set(&mut client.eat_max_bits, *eat_max_bits);
        set(&mut client.min_probes, *min_probes);
        set(&mut client.rpdi_window, *rpdi_window);
        set(&mut client.rpdi_threshold, *rpdi_threshold);
    }
}

fn set<T>(value: &mut Option<T>, given: Option<T>) {
    if given.is_some() {
        *value = given;
    }
}

fn check(field: &str, value: impl ToString, holds: bool, reason: &str) -> Result<(), Error> {
    if holds {
        return Ok(());
    }
    Err(Error::ConfigValidation { field: field.into(), value: value.to_string(), reason: reason.into() })
}

impl ThinkBudgets {
    /// Give the request in this row other thresholds. The next [`ThinkBudgets::decide`] orders what follows from them:
    /// an end at once where the request has thought for longer, or a later end. `None` when its thinking is not
    /// followed.
    pub fn change(&mut self, table: &mut RequestTable, row: RowId, change: &LiveChange) -> Option<Changed> {
        let state = table.row_mut(row)?;
        let (id, thinks) = (state.row_id(), state.phases.is_thinking());
        let (is_before, runs) = (state.phase() == ThinkPhase::Prefill, state.computed_tokens() > 0);
        let record = state.thinking.as_deref_mut()?;
        if record.ordered.is_some() || record.enforcement.is_forcing() {
            return Some(Changed::Ends);
        }
        if !thinks && !is_before {
            return Some(Changed::Answers);
        }
        let asked = record.as_asked.get_or_insert_with(|| Box::new(record.client.clone()));
        if change.reset {
            record.client = ClientBudget::clone(asked);
        }
        change.apply(&mut record.client);
        // A step with its first token may be in flight.
        record.is_asked |= runs;
        self.open(id);
        Some(Changed::Yes)
    }

    /// The thinking of the request in this row; `None` when it is not live.
    #[must_use]
    pub fn thinking_of(&self, table: &RequestTable, row: RowId) -> Option<Thinking> {
        let state = table.get(row)?;
        let Some(record) = state.thinking.as_deref() else {
            // Nothing ends it.
            let Thresholds { min_think_tokens, max_think_tokens, .. } = *self.configured();
            return Some(Thinking {
                think_tokens: state.think_tokens(),
                min_think_tokens,
                max_think_tokens,
                ends_by: None,
            });
        };
        let thresholds = record.budget.thresholds();
        let forced = record.enforcement.forced().map(|(_, reason)| reason);
        Some(Thinking {
            think_tokens: record.enforcement.think_tokens(),
            min_think_tokens: thresholds.min_think_tokens,
            max_think_tokens: record
                .client
                .max_think_tokens
                .map_or(record.enforcement.limit(), |most| most.min(self.most_think_tokens())),
            ends_by: record.ordered.or(forced),
        })
    }
}
