use std::sync::Arc;

use meridian_core::budget::{BudgetCandidate, BudgetDecider, Load, Observed, Repeated, Verdict};
use meridian_core::{
    BlockId, BlockTier, EvictionCandidate, EvictionSubject, Memory, MeridianConfig, PolicySource, Ranking,
    SessionFacts, Subject, ThinkPhase,
};
use meridian_engine::control::{ControlError, Given, Mode, SlotName, SwapReport, Upload};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::PolicyError;

/// What changes the policies of an engine while it runs, and the two slots that a step does not ask.
///
/// Methods that change a policy may compile a component, and release the GIL.
#[pyclass(frozen, module = "meridian._native")]
pub(crate) struct Policies {
    engine: Arc<meridian_engine::Engine>,
}

impl Policies {
    pub(crate) fn new(engine: Arc<meridian_engine::Engine>) -> Self {
        Self { engine }
    }
}

/// The attributes of a `meridian.EvictionCandidate`.
#[derive(FromPyObject)]
struct EvictionRow {
    tier: u8,
    blocks: u32,
    position: u32,
    hits: u32,
    age_ms: f32,
    computed_tokens: u32,
    chain_tokens: u32,
    chain_blocks: u32,
    chain_hits: u32,
    is_generated: bool,
    session: u32,
    turn: u32,
    idle_ms: f32,
    last_gap_ms: f32,
    gap_ms: f32,
    gap_spread_ms: f32,
    gaps: u32,
    stopped_for_tool: bool,
    priority: i32,
    recompute_ms: f32,
    phase: u8,
    preemptions: u32,
    served_tokens: u32,
    awaited: bool,
    level_slack_ms: f32,
}

/// The attributes of a `meridian.ThinkingRequest`.
#[derive(FromPyObject)]
struct BudgetRow {
    prompt_tokens: u32,
    remaining_tokens: u32,
    think_tokens: u32,
    think_ms: f64,
    slack_ms: f64,
    level_slack_ms: f32,
    priority: i32,
    tenant: u32,
    is_probed: bool,
    is_at_boundary: bool,
    probes: u32,
    eat: Option<f64>,
    eat_variance: Option<f64>,
    rpdi: Option<f64>,
    same_answers: u32,
    confidence: Option<f64>,
    repetition: u32,
    repetition_period: u32,
    request: u32,
    session: u32,
    turn: u32,
}

/// Facts about the engine for a budget policy, without what is configured.
#[derive(FromPyObject)]
struct LoadRow {
    now_ms: f64,
    thinking: u32,
    answering: u32,
    waiting: u32,
    free_blocks: u32,
    total_blocks: u32,
}

#[pymethods]
impl Policies {
    /// Load a policy and put it to `mode` ("active" or "shadow"); returns the report as JSON. Without a component it is the
    /// native policy that `source` names ("native:NAME"), or the active one with other options. `signature` is the text of
    /// the component's signature, `options` one JSON object.
    #[pyo3(signature = (slot, component, mode, source, signature=None, options=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn put(
        &self,
        py: Python<'_>,
        slot: &str,
        component: Option<&[u8]>,
        mode: &str,
        source: &str,
        signature: Option<&str>,
        options: Option<&str>,
    ) -> PyResult<String> {
        let slot = slot_named(slot)?;
        let mode = match mode {
            "active" => Mode::Active,
            "shadow" => Mode::Shadow,
            other => return Err(PolicyError::new_err(format!("mode: {other:?}: expected \"active\" or \"shadow\""))),
        };
        // Checked and compiled without the GIL.
        let component = component.map(<[u8]>::to_vec);
        let policy = match (&component, PolicySource::of(source)) {
            (Some(bytes), _) => Given::Component { bytes, signature },
            (None, PolicySource::Native(name)) => Given::Native(name),
            // Fetched on another thread, while this one waits without the GIL.
            (None, PolicySource::Registry(reference)) => Given::Remote(reference),
            (None, PolicySource::File(_)) => Given::Active,
        };
        report(py.detach(|| self.engine.swap(slot, &Upload { policy, options, source }, mode)))
    }

    /// Make the shadow active; returns the report as JSON.
    fn promote(&self, py: Python<'_>, slot: &str) -> PyResult<String> {
        let slot = slot_named(slot)?;
        report(py.detach(|| self.engine.control().promote(slot)))
    }

    /// Return to the version before; returns the report as JSON.
    fn rollback(&self, py: Python<'_>, slot: &str) -> PyResult<String> {
        let slot = slot_named(slot)?;
        report(py.detach(|| self.engine.control().rollback(slot)))
    }

    /// Try the version in quarantine again; returns the report as JSON.
    fn release(&self, py: Python<'_>, slot: &str) -> PyResult<String> {
        let slot = slot_named(slot)?;
        report(py.detach(|| self.engine.control().release(slot)))
    }

    /// End the shadow; returns the report as JSON.
    fn stop_shadow(&self, py: Python<'_>, slot: &str) -> PyResult<String> {
        let slot = slot_named(slot)?;
        report(py.detach(|| self.engine.control().stop_shadow(slot)))
    }

    /// How the process is, as JSON.
    fn status(&self, py: Python<'_>) -> PyResult<String> {
        crate::to_json(&py.detach(|| self.engine.control().status()))
    }

    /// The latest faults, as JSON, oldest first.
    fn faults(&self, py: Python<'_>) -> PyResult<String> {
        crate::to_json(&py.detach(|| self.engine.control().faults()))
    }

    /// The path of the private socket of its admin listener; None without one.
    #[getter]
    fn socket(&self) -> Option<String> {
        self.engine.socket().and_then(|address| Some(address.strip_prefix("unix:")?.to_owned()))
    }

    /// Ask the eviction slot: a key for each candidate, or none for the default's own order; and for how long each is kept,
    /// milliseconds, or nothing when none is.
    fn rank_evictions(
        &self,
        subject: &str,
        now_ms: f64,
        blocks: (u32, u32, u32),
        candidates: Vec<EvictionRow>,
    ) -> PyResult<(Vec<f32>, Vec<f32>)> {
        let subject = match subject {
            "blocks" => Subject::Blocks,
            "requests" => Subject::Requests,
            other => return Err(PyValueError::new_err(format!("subject: {other:?}: expected blocks or requests"))),
        };
        let (free_blocks, cached_blocks, total_blocks) = blocks;
        let memory = Memory { now_ms, subject, free_blocks, cached_blocks, total_blocks };
        let candidates = (0u64..)
            .zip(candidates)
            .map(|(id, row)| eviction_candidate(id, subject, row))
            .collect::<PyResult<Vec<_>>>()?;
        let Ranking { keys, keep_ms } = self.engine.drive().eviction().decide(&memory, &candidates).1.clone();
        Ok((keys, keep_ms))
    }

    /// Ask the budget slot about requests that begin to think; the thresholds as JSON.
    fn thresholds(&self, load: LoadRow, candidates: Vec<BudgetRow>) -> PyResult<String> {
        let driver = &mut *self.engine.drive();
        let load = facts(load, driver.config());
        let candidates: Vec<BudgetCandidate> = candidates.into_iter().map(budget_candidate).collect();
        crate::to_json(&driver.budget().start(&load, &candidates))
    }

    /// Ask the budget slot about requests that think: "default", "keep-thinking" or "end-now" for each.
    fn verdicts(&self, load: LoadRow, candidates: Vec<BudgetRow>) -> Vec<&'static str> {
        let driver = &mut *self.engine.drive();
        let load = facts(load, driver.config());
        let candidates: Vec<BudgetCandidate> = candidates.into_iter().map(budget_candidate).collect();
        let verdicts = driver.budget().probe(&load, &candidates);
        verdicts
            .into_iter()
            .map(|verdict| match verdict {
                Verdict::Default => "default",
                Verdict::KeepThinking => "keep-thinking",
                Verdict::EndNow => "end-now",
            })
            .collect()
    }

    /// End what has threads, ports or files, within some seconds. The engine goes on with the policies it has, which cannot
    /// be changed any more.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.engine.shutdown());
    }
}

fn slot_named(name: &str) -> PyResult<SlotName> {
    SlotName::ALL.into_iter().find(|slot| slot.label() == name).ok_or_else(|| {
        PolicyError::new_err(format!("slot: {name:?}: expected \"dispatch\", \"eviction\" or \"budget\""))
    })
}

fn eviction_candidate(id: u64, subject: Subject, row: EvictionRow) -> PyResult<EvictionCandidate> {
    let out_of_range = |what: &str, value: u8| PyValueError::new_err(format!("{what}: {value}: must be in 0..=2"));
    let tier = *BlockTier::ALL.get(usize::from(row.tier)).ok_or_else(|| out_of_range("tier", row.tier))?;
    let phases = [ThinkPhase::Prefill, ThinkPhase::Think, ThinkPhase::Output];
    let phase = *phases.get(usize::from(row.phase)).ok_or_else(|| out_of_range("phase", row.phase))?;
    let subject = match subject {
        Subject::Blocks => EvictionSubject::Block(BlockId(id)),
        Subject::Requests => EvictionSubject::Request(id),
    };
    Ok(EvictionCandidate {
        subject,
        tier,
        blocks: row.blocks,
        position: row.position,
        hits: row.hits,
        age_ms: row.age_ms,
        computed_tokens: row.computed_tokens,
        chain_tokens: row.chain_tokens,
        chain_blocks: row.chain_blocks,
        chain_hits: row.chain_hits,
        is_generated: row.is_generated,
        session: SessionFacts {
            is_named: true,
            session: row.session,
            turn: row.turn,
            last_gap_ms: row.last_gap_ms,
            gap_ms: row.gap_ms,
            gap_spread_ms: row.gap_spread_ms,
            gaps: row.gaps,
            stopped_for_tool: row.stopped_for_tool,
        },
        idle_ms: row.idle_ms,
        priority: row.priority,
        recompute_ms: row.recompute_ms,
        phase,
        preemptions: row.preemptions,
        served_tokens: row.served_tokens,
        is_awaited: row.awaited,
        level_slack_ms: row.level_slack_ms,
    })
}

fn budget_candidate(row: BudgetRow) -> BudgetCandidate {
    let BudgetRow {
        prompt_tokens,
        remaining_tokens,
        think_tokens,
        think_ms,
        slack_ms,
        level_slack_ms,
        priority,
        tenant,
        is_probed,
        is_at_boundary,
        probes,
        eat,
        eat_variance,
        rpdi,
        same_answers,
        confidence,
        repetition,
        repetition_period,
        request,
        session,
        turn,
    } = row;
    let (eat_bits, eat_variance_bits2) = (eat, eat_variance);
    let observed = Observed {
        think_tokens,
        is_probed,
        is_at_boundary,
        is_repeating: repetition > 0,
        probes,
        eat_bits,
        eat_variance_bits2,
        rpdi,
        same_answers,
        confidence,
        repeated: Repeated { tokens: repetition, period: repetition_period },
    };
    BudgetCandidate {
        prompt_tokens,
        remaining_tokens,
        think_ms,
        slack_ms,
        level_slack_ms,
        priority,
        tenant,
        request,
        session,
        turn,
        observed,
    }
}

fn facts(row: LoadRow, config: &MeridianConfig) -> Load {
    let LoadRow { now_ms, thinking, answering, waiting, free_blocks, total_blocks } = row;
    let configured = config.thresholds();
    Load { now_ms, thinking, answering, waiting, free_blocks, total_blocks, configured, ..Load::default() }
}

fn report(done: Result<SwapReport, ControlError>) -> PyResult<String> {
    crate::to_json(&done.map_err(crate::policy_error)?)
}
