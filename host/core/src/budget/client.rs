use crate::Pattern;

use super::Thresholds;

/// The options of a client. A field that is not set takes the operator's value.
#[derive(Clone, Debug, Default)]
pub struct ClientBudget {
    /// Only the hard cap ends this thinking.
    pub is_off: bool,
    /// Most think tokens; the operator's cap holds as well.
    pub max_think_tokens: Option<u32>,
    /// Think tokens before which only the hard cap and an interrupt end thinking.
    pub min_think_tokens: Option<u32>,
    /// Think tokens between two probes.
    pub eat_probe_interval_tokens: Option<u32>,
    /// Weight of the latest probe, in (0, 1].
    pub ema_alpha: Option<f64>,
    /// Variance below which thinking may end, bits squared; 0 turns EAT off.
    pub eat_variance_threshold: Option<f64>,
    /// Mean entropy above which thinking does not end, bits.
    pub eat_max_bits: Option<f64>,
    /// Number (from 0) of the first probe that may end thinking.
    pub min_probes: Option<u32>,
    /// Tokens in the window of RPDI.
    pub rpdi_window: Option<u32>,
    /// Index above which thinking may end; infinite turns RPDI off.
    pub rpdi_threshold: Option<f64>,
    /// Generating any of these ends its thinking as well.
    pub interrupts: Vec<Pattern>,
    /// It asks for a report on its thinking.
    pub reports: bool,
    /// A stop of the client would end the request inside the phrase that ends its thinking: force the marker alone.
    pub is_plain: bool,
    /// The client limits the tokens that may be sampled (a grammar, `allowed_token_ids`, `bad_words` and the like): a
    /// forced end may have to wait for it.
    pub has_mask: bool,
    /// Ends of sequence do not end the request, so that its number of tokens is fixed: no room is kept for an answer.
    pub ignores_eos: bool,
}

impl ClientBudget {
    /// The thresholds of the operator or a policy, changed by the client's options.
    pub(super) fn over(&self, of: Thresholds) -> Thresholds {
        let max_think_tokens = self.max_think_tokens.map_or(of.max_think_tokens, |max| max.min(of.max_think_tokens));
        let least = self.min_think_tokens.unwrap_or(of.min_think_tokens);
        Thresholds {
            max_think_tokens,
            min_think_tokens: least.min(max_think_tokens),
            eat_probe_interval_tokens: self.eat_probe_interval_tokens.unwrap_or(of.eat_probe_interval_tokens),
            ema_alpha: self.ema_alpha.unwrap_or(of.ema_alpha),
            eat_variance_threshold: self.eat_variance_threshold.unwrap_or(of.eat_variance_threshold),
            eat_max_bits: self.eat_max_bits.unwrap_or(of.eat_max_bits),
            min_probes: self.min_probes.unwrap_or(of.min_probes),
            rpdi_window: self.rpdi_window.unwrap_or(of.rpdi_window),
            rpdi_threshold: self.rpdi_threshold.unwrap_or(of.rpdi_threshold),
        }
    }

    /// Whether its client asks for anything about its thinking.
    pub(super) fn asks(&self) -> bool {
        self.is_off
            || self.max_think_tokens.is_some()
            || !self.interrupts.is_empty()
            || self.reports
            || self.eat_probe_interval_tokens.is_some()
            || self.has_signals_of_its_own()
    }

    /// Whether the request has its own thresholds for its signals, which a policy does not see.
    pub(super) fn has_signals_of_its_own(&self) -> bool {
        let Self {
            is_off: _,
            max_think_tokens: _,
            min_think_tokens,
            eat_probe_interval_tokens: _,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes,
            rpdi_window,
            rpdi_threshold,
            interrupts: _,
            reports: _,
            is_plain: _,
            has_mask: _,
            ignores_eos: _,
        } = self;
        min_think_tokens.is_some()
            || ema_alpha.is_some()
            || eat_variance_threshold.is_some()
            || eat_max_bits.is_some()
            || min_probes.is_some()
            || rpdi_window.is_some()
            || rpdi_threshold.is_some()
    }
}
