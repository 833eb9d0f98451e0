//! What an engine tells of itself, and what it is told beside its steps.

use std::time::Duration;

use meridian_core::slot::Source;
use meridian_core::{FaultKind, ThinkPhase};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::engine::Engine;

#[pymethods]
impl Engine {
    /// Whether the next step is the engine's own: `native:fcfs` decides in the dispatch slot, and neither the configuration
    /// nor a swap has a say in KV memory or thinking. The engine is only followed then.
    #[getter]
    fn is_stock(&self) -> bool {
        self.engine.drive().is_stock()
    }

    /// Whether a shadow or a recording sees what the dispatch slot decides.
    #[getter]
    fn is_watched(&self) -> bool {
        self.engine.drive().is_watched()
    }

    /// Whether the thinking of a request that ended can never be matched again: True when the model's template strips it
    /// from later prompts, None when it must not be looked at.
    #[getter]
    fn evicts_dead_thinking(&self) -> Option<bool> {
        self.engine.drive().config().evicts_dead_thinking()
    }

    /// What may change the outputs of requests that ask for nothing, in a line.
    #[getter]
    fn outputs(&self) -> String {
        self.engine.drive().outputs()
    }

    /// Whether the engine's KV memory is Meridian's to order.
    #[getter]
    fn manages_kv(&self) -> bool {
        self.engine.drive().config().kv_memory.enabled
    }

    /// Whether waiting requests may take the places of running ones.
    #[getter]
    fn preempts_for_waiting(&self) -> bool {
        self.engine.drive().config().scheduler.preempt_for_waiting
    }

    /// Whether any service level is configured.
    #[getter]
    fn promises(&self) -> bool {
        self.engine.drive().promises()
    }

    /// Free KV blocks that admission leaves for each running request.
    #[getter]
    fn growth_blocks(&self) -> f64 {
        self.engine.drive().growth_blocks()
    }

    /// The effective configuration it was made with, as JSON, and what relative paths in it are relative to.
    #[getter]
    fn config_json(&self) -> PyResult<String> {
        crate::to_json(self.engine.drive().config())
    }

    #[getter]
    fn base_dir(&self) -> String {
        self.engine.drive().settings().base_dir.display().to_string()
    }

    /// Token sequences that begin a tool call, as they were given.
    #[getter]
    fn tool_calls(&self) -> Vec<Vec<u32>> {
        self.tool_calls.clone()
    }

    /// Running and waiting requests that answer, and the learned step time: fixed, a decode token, a prefill token, in
    /// milliseconds; None until it is learned.
    #[getter]
    fn step_facts(&self) -> Option<(u64, (f32, f32, f32))> {
        let mut driver = self.engine.drive();
        let mirror = driver.scheduler().mirror();
        let fit = mirror.step_time()?;
        let answering = mirror.phases()[ThinkPhase::Output as usize];
        Some((answering, (fit.fixed_ms, fit.decode_token_ms, fit.prefill_token_ms)))
    }

    /// Preemptions of requests that answered.
    #[getter]
    fn output_preemptions(&self) -> u64 {
        self.engine.drive().scheduler().mirror().preemptions()[ThinkPhase::Output as usize]
    }

    /// The engine ran dry: the time until the next step is not a step's.
    fn idle(&self) {
        self.engine.drive().idle();
    }

    /// Forget the requests that the engine has no more, though it never said that they ended; `live` has the ids of those that it
    /// has. At most once a minute: other calls do nothing.
    fn reap(&self, now_ms: f64, live: &Bound<'_, PyDict>) {
        let rows = self.engine.drive().reap(now_ms, |id| live.contains(id).unwrap_or(true));
        let gone: Vec<_> = rows.into_iter().filter_map(|row| self.handles().remove(row)).collect();
        // Dropped when nothing is locked any more, as in `remove`.
        drop(gone);
    }

    /// What the latest plan left to run could not run, and the engine lifted its caps.
    fn overruled(&self) {
        self.engine.drive().overruled();
    }

    /// Phase of a request: "prefill", "think" or "output"; None when it is not known.
    fn phase(&self, request_id: &str) -> Option<&'static str> {
        let phase = self.of(request_id, |driver, row| Some(driver.request(row)?.phase()))??;
        Some(match phase {
            ThinkPhase::Prefill => "prefill",
            ThinkPhase::Think => "think",
            ThinkPhase::Output => "output",
        })
    }

    /// Position of a request's first token of thinking; None before it has thought, or when it is not known.
    fn think_from(&self, request_id: &str) -> Option<u32> {
        self.of(request_id, |driver, row| driver.request(row)?.think_from())?
    }

    /// What the slot has done; the keys are those of `meridian.Stats`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let driver = &mut *self.engine.drive();
        let slot = driver.scheduler().slot();
        let (stats, version) = (slot.stats(), slot.version());
        let dict = PyDict::new(py);
        dict.set_item("policy", &version.name)?;
        dict.set_item("policy_version", &version.version)?;
        dict.set_item("policy_sha256", &version.sha256)?;
        dict.set_item("idle_plans", slot.idle_plans())?;
        dict.set_item("last_fault", slot.last_fault().map(|fault| fault.to_string()))?;
        dict.set_item("requests", driver.scheduler().mirror().table.len())?;
        dict.set_item("decisions", stats.decisions())?;
        dict.set_item("decided_by_policy", stats.active)?;
        dict.set_item("left_to_default", stats.default)?;
        dict.set_item("decided_by_fallback", stats.fallback)?;
        dict.set_item("deciding_ms", milliseconds(stats.deciding))?;
        dict.set_item("longest_decision_ms", milliseconds(stats.longest))?;
        let faults = PyDict::new(py);
        for kind in FaultKind::ALL {
            faults.set_item(kind.label(), stats.faults(kind))?;
        }
        dict.set_item("faults", faults)?;
        let [prefill, think, output] = driver.scheduler().mirror().preemptions();
        let preemptions = PyDict::new(py);
        preemptions.set_item("prefill", prefill)?;
        preemptions.set_item("think", think)?;
        preemptions.set_item("output", output)?;
        dict.set_item("preemptions", preemptions)?;
        dict.set_item("kv", driver.kv_status().map(|kv| crate::kv::to_dict(py, &kv)).transpose()?)?;
        let budget = driver.thinking_status();
        dict.set_item("budget", budget.map(|budget| crate::thinking::to_dict(py, &budget)).transpose()?)?;
        let step_time =
            driver.scheduler().step_time().map(|fit| (fit.fixed_ms, fit.decode_token_ms, fit.prefill_token_ms));
        dict.set_item("step_time_ms", step_time)?;
        dict.set_item(
            "last_source",
            driver.scheduler().last_source().map(|source| match source {
                Source::Active => "policy",
                Source::Default => "default",
                Source::Fallback => "fallback",
            }),
        )?;
        Ok(dict)
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
