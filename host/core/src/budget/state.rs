use std::sync::Arc;

use crate::{EntropySignal, Error, Pattern};

use super::{Eat, Repeated, Repetition, Rpdi, Thresholds, Verdict, check_thresholds};

/// Facts about a request's thinking, for a budget policy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Observed {
    /// Think tokens taken in.
    pub think_tokens: u32,
    /// There is a probe that no decision has weighed.
    pub is_probed: bool,
    /// There is an end of a sentence, a line or a clause that no decision has weighed, with or without an index.
    pub is_at_boundary: bool,
    /// The thinking repeats itself, and it is time to ask a policy that reads this.
    pub is_repeating: bool,
    /// Probes taken in.
    pub probes: u32,
    /// Mean of the probes, bits.
    pub eat_bits: Option<f64>,
    /// Their variance, bits squared.
    pub eat_variance_bits2: Option<f64>,
    /// The path deviation index.
    pub rpdi: Option<f64>,
    /// Latest consecutive probes with the same most likely next token; 0 when the latest probe gave none.
    pub same_answers: u32,
    /// Probability of the most likely next token of the latest probe; `None` when it gave none.
    pub confidence: Option<f64>,
    /// The repetition at the end of the thinking; none where it is not followed.
    pub repeated: Repeated,
}

impl Observed {
    /// Whether there is a fact that no decision has weighed: time to ask the policy.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.is_probed || self.is_at_boundary || self.is_repeating
    }
}

/// The reason why the end of thinking is forced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ForceReason {
    /// The thinking reached `max_think_tokens`.
    HardCap,
    /// The policy decided so.
    Policy,
    /// [`Eat`]: the answer has settled.
    Eat,
    /// [`Rpdi`]: the reasoning has strayed.
    Rpdi,
    /// An interrupt pattern was generated.
    Pattern,
    /// The model ended the sequence inside its thinking, where that is guarded.
    EosGuard,
    /// [`Repeated`]: the thinking is a loop.
    Loop,
    /// The rest of the request's tokens is for the answer.
    Reserve,
}

impl ForceReason {
    /// Every reason, in the order of the discriminants.
    pub const ALL: [Self; 8] =
        [Self::HardCap, Self::Policy, Self::Eat, Self::Rpdi, Self::Pattern, Self::EosGuard, Self::Loop, Self::Reserve];

    /// The reason as a metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::HardCap => "hard-cap",
            Self::Policy => "policy",
            Self::Eat => "eat",
            Self::Rpdi => "rpdi",
            Self::Pattern => "pattern",
            Self::EosGuard => "eos-guard",
            Self::Loop => "loop",
            Self::Reserve => "reserve",
        }
    }
}

/// How to treat thinking that repeats itself.
///
/// ```
/// use meridian_core::budget::{ForceReason, OnLoops, ThinkBudget, Thresholds, Verdict};
///
/// let mut budget = ThinkBudget::new(Thresholds::default(), [].into()).unwrap();
/// budget.on_loops(OnLoops::End);
/// (0..1034).for_each(|number| budget.on_token(number % 10, None, false));
/// assert_eq!(budget.decide(Verdict::KeepThinking), Some(ForceReason::Loop));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLoops {
    /// Look for none.
    #[default]
    Ignore,
    /// Tell the policy.
    Tell,
    /// Tell the policy, and end a certain loop ([`Repeated::is_loop`]).
    End,
}

/// The thinking of one request, from its first think token to the decision to end it.
///
/// Feed it every think token and every probe, and call [`ThinkBudget::decide`] after each: a signal counts only for the
/// first decision after it. Replaying the same tokens and probes gives the same answers.
///
/// ```
/// use meridian_core::EntropySignal;
/// use meridian_core::budget::{ForceReason, ThinkBudget, Thresholds, Verdict};
///
/// let thresholds = Thresholds { min_think_tokens: 2, max_think_tokens: 4, ..Thresholds::default() };
/// let mut budget = ThinkBudget::new(thresholds, [].into()).unwrap();
/// for token in 0..3 {
///     budget.on_token(token, Some(EntropySignal::from_nats(0.3)), false);
///     assert_eq!(budget.decide(Verdict::KeepThinking), None);
/// }
/// budget.on_token(3, None, false);
/// assert_eq!(budget.decide(Verdict::KeepThinking), Some(ForceReason::HardCap));
/// ```
#[derive(Clone, Debug)]
pub struct ThinkBudget {
    thresholds: Thresholds,
    interrupts: Arc<[Pattern]>,
    matched: Vec<u16>,
    tokens: u32,
    last_probe: u32,
    /// A probe of an earlier token is running.
    is_probing: bool,
    eat: Eat,
    rpdi: Rpdi,
    /// Most likely next token of the latest probe, and the number of consecutive probes that gave it.
    answer: Option<u32>,
    same_answers: u32,
    /// Probability of that token, if known.
    confidence: Option<f64>,
    on_loops: OnLoops,
    /// Of the thinking since it was followed; without memory until the first token.
    repetition: Repetition,
    is_interrupted: bool,
    /// The policy decided `EndNow` below the minimum, and has not withdrawn it.
    ends_at_minimum: bool,
    /// There is a probe that no decision has weighed.
    is_probed: bool,
    /// The index at the latest boundary token that no decision has weighed.
    at_boundary: Option<f64>,
    /// There is a boundary token without an index that no decision has weighed.
    is_past_boundary: bool,
    /// There is a repetition that no decision has weighed.
    is_repeating: bool,
    /// Think tokens at the latest decision.
    weighed: u32,
    forced: Option<ForceReason>,
}

impl ThinkBudget {
    /// A request without tokens; generating any of `interrupts` ends thinking.
    ///
    /// # Errors
    /// [`Error::ConfigValidation`] when the thresholds are out of range.
    pub fn new(thresholds: Thresholds, interrupts: Arc<[Pattern]>) -> Result<Self, Error> {
        check_thresholds(&thresholds)?;
        Ok(Self {
            thresholds,
            matched: vec![0; interrupts.len()],
            interrupts,
            tokens: 0,
            last_probe: 0,
            is_probing: false,
            eat: Eat::default(),
            rpdi: Rpdi::new(thresholds.rpdi_window),
            answer: None,
            same_answers: 0,
            confidence: None,
            on_loops: OnLoops::Ignore,
            repetition: Repetition::default(),
            is_interrupted: false,
            ends_at_minimum: false,
            is_probed: false,
            at_boundary: None,
            is_past_boundary: false,
            is_repeating: false,
            weighed: 0,
            forced: None,
        })
    }

    /// Use other thresholds from now on; measurements stay.
    ///
    /// # Errors
    /// [`Error::ConfigValidation`] when they are out of range; the present thresholds stay.
    pub fn set_thresholds(&mut self, thresholds: Thresholds) -> Result<(), Error> {
        check_thresholds(&thresholds)?;
        self.rpdi.set_window(thresholds.rpdi_window);
        self.thresholds = thresholds;
        Ok(())
    }

    /// Take in one think token and the entropy of its sampling, if measured. `at_boundary`: the token ends a sentence,
    /// a line or a clause; without an entropy, it is no signal, see [`ThinkBudget::on_boundary`].
    pub fn on_token(&mut self, token: u32, entropy: Option<EntropySignal>, at_boundary: bool) {
        self.tokens = self.tokens.saturating_add(1);
        if self.on_loops != OnLoops::Ignore {
            self.repetition.push(token);
        }
        if let Some(entropy) = entropy {
            self.on_entropy(entropy, at_boundary);
        }
        for (pattern, matched) in self.interrupts.iter().zip(&mut self.matched) {
            self.is_interrupted |= pattern.advance(matched, token);
        }
    }

    /// Take in the entropy of an earlier token: a device measured it, and it arrived after the token. Entropies arrive
    /// in the order of their tokens.
    pub fn on_entropy(&mut self, entropy: EntropySignal, at_boundary: bool) {
        if self.rpdi.push(entropy.nats()) && at_boundary {
            self.at_boundary = self.rpdi.value();
        }
    }

    /// Note a sentence, a line or a clause that ended without an index. That is no signal for the host's own rules. A
    /// policy is asked all the same, unless it was asked within the last `eat_probe_interval_tokens`.
    pub fn on_boundary(&mut self) {
        self.is_past_boundary |= self.tokens - self.weighed >= self.thresholds.eat_probe_interval_tokens;
    }

    /// Look for repetitions from the next token on, or no longer.
    pub fn on_loops(&mut self, on_loops: OnLoops) {
        if on_loops == OnLoops::Ignore {
            self.forget_repetition();
        }
        self.on_loops = on_loops;
    }

    /// Forget the tokens that a repetition would repeat, and free their memory: thinking is over, or begins again.
    pub fn forget_repetition(&mut self) {
        self.repetition = Repetition::default();
        self.is_repeating = false;
    }

    /// Note the repetition at the end of the thinking, if there is one, for a policy that reads it. It is asked unless it
    /// was asked within the last `eat_probe_interval_tokens`. Returns whether it is to be asked.
    pub fn on_repetition(&mut self) -> bool {
        let is_time = self.tokens - self.weighed >= self.thresholds.eat_probe_interval_tokens;
        self.is_repeating |= is_time && self.repetition.found().period > 0;
        self.is_repeating
    }

    /// Take in the result of a probe after the latest token: the entropy, and the most likely next token, `None` if
    /// unknown. A probe without a measured entropy is no signal, whatever its answer; the next is due at the same
    /// interval. Returns whether it is a signal.
    pub fn on_probe(&mut self, entropy: EntropySignal, answer: Option<u32>) -> bool {
        if !std::mem::take(&mut self.is_probing) {
            self.last_probe = self.tokens;
        }
        if !self.eat.observe(entropy.bits(), self.thresholds.ema_alpha) {
            return false;
        }
        self.is_probed = true;
        self.confidence = None;
        let again = if self.answer == answer { self.same_answers } else { 0 };
        self.same_answers = if answer.is_some() { again.saturating_add(1) } else { 0 };
        self.answer = answer;
        true
    }

    /// Note the confidence of the latest probe, the probability of its most likely token. Anything else than a number
    /// above 0 and up to 1 counts as not measured.
    pub fn on_confidence(&mut self, confidence: f32) {
        self.confidence = is_confidence(confidence).then(|| confidence.into());
    }

    /// Start a probe of the tokens so far; its result may come later. The next is due one interval from here.
    pub fn begin_probe(&mut self) {
        self.last_probe = self.tokens;
        self.is_probing = true;
    }

    /// Whether `eat_probe_interval_tokens` have been thought since the last probe, and the end is not decided.
    #[must_use]
    pub fn probe_due(&self) -> bool {
        self.forced.is_none() && self.tokens - self.last_probe >= self.thresholds.eat_probe_interval_tokens
    }

    /// Decide whether to end thinking now, in this order: the hard cap; an interrupt pattern; below `min_think_tokens`,
    /// nothing else; the policy's `EndNow`, given now or below the minimum; a loop ([`OnLoops::End`]); the policy's
    /// `KeepThinking`, which discards the signals so far; EAT; RPDI.
    ///
    /// A decision to end is final, with its first reason.
    pub fn decide(&mut self, verdict: Verdict) -> Option<ForceReason> {
        match verdict {
            Verdict::EndNow => self.ends_at_minimum = true,
            Verdict::KeepThinking => self.ends_at_minimum = false,
            Verdict::Default => {}
        }
        self.forced = self.reason(verdict);
        self.is_probed = false;
        self.at_boundary = None;
        self.is_past_boundary = false;
        self.is_repeating = false;
        self.weighed = self.tokens;
        self.forced
    }

    /// Whether thinking ends now, whatever the policy would answer: an `EndNow` from below `min_think_tokens` was not
    /// withdrawn, or there is a loop to end.
    #[must_use]
    pub fn is_end_due(&self) -> bool {
        let is_due = self.ends_at_minimum || self.is_in_loop();
        self.forced.is_none() && is_due && self.tokens >= self.thresholds.min_think_tokens
    }

    /// Carry out such an end, if one is due. New facts wait for the next decision.
    pub fn end_if_due(&mut self) -> Option<ForceReason> {
        if self.is_end_due() {
            self.forced = self.reason(Verdict::Default);
        }
        self.forced
    }

    /// The result of [`ThinkBudget::decide`] for [`Verdict::Default`].
    #[must_use]
    pub fn by_default(&self) -> Option<ForceReason> {
        self.reason(Verdict::Default)
    }

    fn reason(&self, verdict: Verdict) -> Option<ForceReason> {
        let Thresholds { min_think_tokens, max_think_tokens, rpdi_threshold, .. } = self.thresholds;
        if self.forced.is_some() {
            self.forced
        } else if self.tokens >= max_think_tokens {
            Some(ForceReason::HardCap)
        } else if self.is_interrupted {
            Some(ForceReason::Pattern)
        } else if self.tokens < min_think_tokens {
            None
        } else if self.ends_at_minimum {
            Some(ForceReason::Policy)
        } else if self.is_in_loop() {
            Some(ForceReason::Loop)
        } else {
            match verdict {
                Verdict::EndNow | Verdict::KeepThinking => None,
                Verdict::Default if self.is_probed && self.eat.fires(&self.thresholds) => Some(ForceReason::Eat),
                Verdict::Default if self.at_boundary.is_some_and(|index| index > rpdi_threshold) => {
                    Some(ForceReason::Rpdi)
                }
                Verdict::Default => None,
            }
        }
    }

    fn is_in_loop(&self) -> bool {
        self.on_loops == OnLoops::End && self.repetition.found().is_loop()
    }

    /// The facts for a policy, as of the latest token or probe.
    #[must_use]
    pub fn observed(&self) -> Observed {
        Observed {
            think_tokens: self.tokens,
            is_probed: self.is_probed,
            is_at_boundary: self.at_boundary.is_some() || self.is_past_boundary,
            is_repeating: self.is_repeating,
            probes: self.eat.probes(),
            eat_bits: self.eat.mean(),
            eat_variance_bits2: self.eat.variance(),
            rpdi: self.rpdi.value(),
            same_answers: self.same_answers,
            confidence: self.confidence,
            repeated: self.repetition.found(),
        }
    }

    /// Whether there is an index at a boundary that no decision has weighed.
    #[must_use]
    pub fn has_boundary_index(&self) -> bool {
        self.at_boundary.is_some()
    }

    /// Think tokens taken in.
    #[must_use]
    pub fn think_tokens(&self) -> u32 {
        self.tokens
    }

    /// The thresholds in force.
    #[must_use]
    pub fn thresholds(&self) -> &Thresholds {
        &self.thresholds
    }

    /// Mean and variance of the probes, in bits.
    #[must_use]
    pub fn eat(&self) -> &Eat {
        &self.eat
    }

    /// The path deviation index after the latest token; `None` before its window is full.
    #[must_use]
    pub fn rpdi(&self) -> Option<f64> {
        self.rpdi.value()
    }

    /// Latest consecutive probes with the same most likely next token; 0 before the first, and when the latest gave
    /// none.
    #[must_use]
    pub fn same_answers(&self) -> u32 {
        self.same_answers
    }

    /// The reason for the decided end; `None` without a decision.
    #[must_use]
    pub fn forced(&self) -> Option<ForceReason> {
        self.forced
    }
}

/// Whether this is the probability of a likeliest token.
pub(super) fn is_confidence(value: f32) -> bool {
    value > 0.0 && value <= 1.0
}
