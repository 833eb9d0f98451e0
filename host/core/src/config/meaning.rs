//! The joint meaning of several fields.

use crate::{Budget, Dispatch};

use super::{Auto, MeridianConfig, SchedulerConfig, StopStrings};

impl MeridianConfig {
    /// Whether the configuration selects the engine's own behaviour: the engine's order (`native:fcfs`, or a policy in
    /// shadow), and the defaults for KV memory and thinking budgets.
    ///
    /// ```
    /// use meridian_core::MeridianConfig;
    ///
    /// let stock = "[policy.dispatch]\nsource = 'native:fcfs'\n";
    /// assert!(MeridianConfig::from_toml(stock)?.asks_for_stock());
    /// assert!(!MeridianConfig::default().asks_for_stock());
    /// let in_shadow = "[policy.dispatch]\nsource = 'mine.wasm'\nmode = 'shadow'\n";
    /// assert!(MeridianConfig::from_toml(in_shadow)?.asks_for_stock());
    /// let with_eviction = format!("{stock}[policy.eviction]\nsource = 'mine.wasm'\n");
    /// assert!(!MeridianConfig::from_toml(&with_eviction)?.asks_for_stock());
    /// # Ok::<(), meridian_core::Error>(())
    /// ```
    #[must_use]
    pub fn asks_for_stock(&self) -> bool {
        self.policy.dispatch.deciding::<Dispatch>() == super::STOCK && self.leaves_memory_and_thinking()
    }

    /// Whether the configuration leaves KV memory, thinking budgets and service levels to the engine. The engine is then
    /// stock whenever [`STOCK`](super::STOCK) decides in the dispatch slot.
    ///
    /// ```
    /// use meridian_core::MeridianConfig;
    ///
    /// assert!(MeridianConfig::default().leaves_memory_and_thinking());
    /// assert!(!MeridianConfig::from_toml("[scheduler]\nmax_think_tokens = 4096")?.leaves_memory_and_thinking());
    /// assert!(MeridianConfig::from_toml("[scheduler]\nend_loops = false")?.leaves_memory_and_thinking());
    /// assert!(!MeridianConfig::from_toml("[scheduler]\nend_loops = true")?.leaves_memory_and_thinking());
    /// let eviction = "[policy.eviction]\nsource = 'native:ttl'\n";
    /// assert!(!MeridianConfig::from_toml(eviction)?.leaves_memory_and_thinking());
    /// assert!(MeridianConfig::from_toml(&format!("{eviction}mode = 'shadow'"))?.leaves_memory_and_thinking());
    /// # Ok::<(), meridian_core::Error>(())
    /// ```
    #[must_use]
    pub fn leaves_memory_and_thinking(&self) -> bool {
        (!self.kv_memory.enabled
            || self.policy.eviction.has_no_say(&super::SlotConfig::eviction())
                && self.kv_memory == super::KvMemoryConfig::default())
            && !self.says_something_of_budgets()
            && !self.refuses()
            && !self.service_levels.values().any(|level| level.least_share > 0.0)
    }

    /// Whether late requests of any service level are refused.
    fn refuses(&self) -> bool {
        self.service_levels.values().any(|level| level.late == super::Late::Refuse)
    }

    /// Whether any field is set that ends thinking or judges budgets.
    fn says_something_of_budgets(&self) -> bool {
        let stock = SchedulerConfig::default();
        !self.policy.budget.has_no_say(&super::SlotConfig::budget())
            || self.entropy != super::EntropyConfig::default()
            || self.scheduler.min_think_tokens != stock.min_think_tokens
            || !self.leaves_outputs()
    }

    /// What may change the outputs of requests whose clients ask for nothing, in a line: `as vLLM` when nothing may.
    ///
    /// ```
    /// use meridian_core::MeridianConfig;
    ///
    /// let of = |text: &str| MeridianConfig::from_toml(text).map(|config| config.outputs());
    /// assert_eq!(of("")?, "as vLLM");
    /// assert_eq!(
    ///     of("[scheduler]\nmax_think_tokens = 4096\nend_loops = true")?,
    ///     "thinking ends at 4,096 tokens; loops end"
    /// );
    /// # Ok::<(), meridian_core::Error>(())
    /// ```
    #[must_use]
    pub fn outputs(&self) -> String {
        let changes = self.changes_of_outputs();
        if changes.is_empty() { "as vLLM".into() } else { changes.join("; ") }
    }

    /// Whether no setting may change an output.
    #[must_use]
    pub fn leaves_outputs(&self) -> bool {
        self.changes_of_outputs().is_empty()
    }

    /// The settings that may change an output, each in words.
    fn changes_of_outputs(&self) -> Vec<String> {
        let Self { scheduler, entropy, policy, model, .. } = self;
        let mut changes = Vec::new();
        let mut note = |holds: bool, change: &dyn Fn() -> String| {
            if holds {
                changes.push(change());
            }
        };
        if !model.think_end.is_empty() {
            let most = scheduler.max_think_tokens;
            note(most < SchedulerConfig::NO_LIMIT, &|| format!("thinking ends at {} tokens", grouped(most)));
            note(scheduler.end_loops, &|| "loops end".into());
            note(model.eos_guard, &|| "an end of sequence inside the thinking ends the thinking instead".into());
            note(model.min_answer_tokens > 0, &|| {
                format!("answers of requests with a budget have at least {} tokens", model.min_answer_tokens)
            });
            let reserve = scheduler.answer_reserve_tokens;
            note(reserve > 0, &|| format!("thinking with a budget leaves {reserve} tokens for the answer"));
            note(!model.interrupt.is_empty(), &|| "interrupts end thinking".into());
            let source = policy.budget.deciding::<Budget>();
            let is_own = source != super::SlotConfig::budget().source && source != "native:noop";
            note(is_own, &|| format!("the budget policy {source} ends thinking"));
            let strays = entropy.enabled && entropy.rpdi_threshold.is_finite();
            note(strays && !is_own, &|| {
                format!("thinking ends when it strays (RPDI above {})", entropy.rpdi_threshold)
            });
            let settles = entropy.enabled && !entropy.probe_suffix.is_empty();
            note(settles && !is_own, &|| "thinking ends when its answer has settled (EAT)".into());
            let efforts = scheduler.reasoning_effort != super::ReasoningEfforts::default();
            note(efforts, &|| "a client's reasoning effort limits its thinking".into());
            note(model.stop_strings == StopStrings::Answer, &|| "stop strings bind only in the answer".into());
        }
        note(self.refuses(), &|| "requests whose service level cannot be kept any more are refused".into());
        changes
    }

    /// Whether the thinking of an ended request can never be matched again, unless the request itself says otherwise;
    /// `None` when Meridian must ignore it (`kv_memory.evict_dead_thinking = false`).
    ///
    /// ```
    /// use meridian_core::MeridianConfig;
    ///
    /// let of = |text: &str| MeridianConfig::from_toml(text).map(|config| config.evicts_dead_thinking());
    /// assert_eq!(of("[model]\nfamily = 'qwen3'")?, Some(true));
    /// assert_eq!(of("[model]\nfamily = 'minimax-m2'")?, Some(false));
    /// assert_eq!(of("[kv_memory]\nevict_dead_thinking = true\n[model]\nfamily = 'minimax-m2'")?, Some(true));
    /// assert_eq!(of("[kv_memory]\nevict_dead_thinking = false\n[model]\nfamily = 'qwen3'")?, None);
    /// # Ok::<(), meridian_core::Error>(())
    /// ```
    #[must_use]
    pub fn evicts_dead_thinking(&self) -> Option<bool> {
        match self.kv_memory.evict_dead_thinking {
            Auto::Set(false) => None,
            Auto::Set(true) => Some(true),
            Auto::Auto => Some(self.model.strips_reasoning_or_keep()),
        }
    }
}

/// A number with commas between its thousands.
fn grouped(number: u32) -> String {
    let digits = number.to_string();
    let mut shown = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}
