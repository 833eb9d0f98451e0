use crate::policies::{Choice, Loader, Policies, PolicyArg};
use crate::results::Slo;
use crate::sim::{EngineConfig, Outcome, Simulation, StepModel, StepWork};
use crate::vllm::{RecordedRun, RecordedSteps, STOCK, meridian_config};

impl RecordedRun {
    /// The engine it ran in, with step times of `step`.
    #[must_use]
    pub fn engine(&self, step: StepModel) -> EngineConfig {
        EngineConfig {
            step,
            max_num_seqs: self.engine.max_num_seqs,
            max_num_batched_tokens: self.engine.max_num_batched_tokens,
            kv_blocks: self.engine.num_gpu_blocks,
            block_tokens: self.engine.block_size,
            ..EngineConfig::default()
        }
    }

    /// Simulate its requests under its own policy.
    ///
    /// # Errors
    /// The policy cannot be loaded.
    pub fn simulate(&self, step: StepModel) -> anyhow::Result<Outcome> {
        let source = if self.scheduler == STOCK { "native:fcfs" } else { &self.scheduler };
        let config = meridian_config(&self.engine.settings)?;
        let options = &config.policy.dispatch.config;
        let options = if options.is_empty() { String::new() } else { serde_json::to_string(options)? };
        let dispatch: PolicyArg = format!("{source}{options}").parse().map_err(anyhow::Error::msg)?;
        let mut loader = Loader::new(config);
        let choice = Choice { dispatch, eviction: None, budget: None, inject: None };
        let policies = Policies::load(&mut loader, &choice, 0)?;
        let requests = self.requests();
        let simulation = Simulation::new(&self.engine(step), vec![policies], Slo::default(), requests.len());
        Ok(simulation.keeping_times().run(requests.into_iter(), |_| {}))
    }

    /// Steps of which the simulator's are the same: as many requests, tokens, tokens of context and pairs. Means something
    /// where time decides nothing: every request was there from the start, and the scheduler is vLLM's own.
    pub(super) fn same_steps(&self, works: &[StepWork]) -> u64 {
        let RecordedSteps { requests, tokens, context_tokens, attention_pairs, .. } = &self.steps;
        let real = (0..tokens.len()).map(|i| StepWork {
            requests: requests[i],
            tokens: tokens[i],
            context_tokens: context_tokens[i],
            attention_pairs: attention_pairs[i],
        });
        real.zip(works).filter(|(real, simulated)| real == *simulated).count() as u64
    }
}
