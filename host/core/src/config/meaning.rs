//! The joint meaning of several fields.

use super::{Auto, MeridianConfig, SlotMode};

impl MeridianConfig {
    /// Whether the configuration selects the engine's own behaviour: the engine's order (`native:fcfs`, active), and
    /// the defaults for KV memory and thinking budgets.
    ///
    /// ```
    /// use meridian_core::MeridianConfig;
    ///
    /// let stock = "[policy.dispatch]\nsource = 'native:fcfs'\n";
    /// assert!(MeridianConfig::from_toml(stock)?.asks_for_stock());
    /// assert!(!MeridianConfig::default().asks_for_stock());
    /// let in_shadow = format!("{stock}mode = 'shadow'\n");
    /// assert!(!MeridianConfig::from_toml(&in_shadow)?.asks_for_stock());
    /// let with_eviction = format!("{stock}[policy.eviction]\nsource = 'mine.wasm'\n");
    /// assert!(!MeridianConfig::from_toml(&with_eviction)?.asks_for_stock());
    /// # Ok::<(), meridian_core::Error>(())
    /// ```
    #[must_use]
    pub fn asks_for_stock(&self) -> bool {
        let dispatch = &self.policy.dispatch;
        dispatch.source == super::STOCK && dispatch.mode == SlotMode::Active && self.leaves_memory_and_thinking()
    }

    /// Whether the configuration leaves KV memory and thinking budgets to the engine. The engine is then stock whenever
    /// [`STOCK`](super::STOCK) decides in the dispatch slot.
    ///
    /// ```
    /// use meridian_core::MeridianConfig;
    ///
    /// assert!(MeridianConfig::default().leaves_memory_and_thinking());
    /// assert!(!MeridianConfig::from_toml("[scheduler]\nmax_think_tokens = 4096")?.leaves_memory_and_thinking());
    /// assert!(MeridianConfig::from_toml("[scheduler]\nend_loops = false")?.leaves_memory_and_thinking());
    /// # Ok::<(), meridian_core::Error>(())
    /// ```
    #[must_use]
    pub fn leaves_memory_and_thinking(&self) -> bool {
        (!self.kv_memory.enabled
            || self.policy.eviction == super::SlotConfig::eviction()
                && self.kv_memory == super::KvMemoryConfig::default())
            && !self.says_something_of_budgets()
    }

    /// Whether any field is set that ends thinking or judges budgets.
    fn says_something_of_budgets(&self) -> bool {
        let stock = super::SchedulerConfig::default();
        self.policy.budget != super::SlotConfig::budget()
            || self.entropy != super::EntropyConfig::default()
            || self.scheduler.min_think_tokens != stock.min_think_tokens
            || self.scheduler.max_think_tokens != stock.max_think_tokens
            || self.scheduler.reasoning_effort != stock.reasoning_effort
            || !self.model.interrupt.is_empty()
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
