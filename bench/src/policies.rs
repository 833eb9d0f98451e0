//! Policies by the names that the command line takes.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use meridian_core::config::SlotMode;
use meridian_core::oci::OciReference;
use meridian_core::slot::{BudgetSlot, Contender, DispatchSlot, EvictionSlot, PolicySlot};
use meridian_core::{
    Batch, Budget, Description, Dispatch, Eviction, Fault, FaultKind, MeridianConfig, Policy, PolicySource, SlotConfig,
    SlotName, native,
};
use meridian_engine::{Components, Origin, Terms, strike_limits};
use meridian_wasm::GuestKind;
use rand::RngExt;
use rand::SeedableRng;
use rand_pcg::Pcg64;

use crate::fault_limit::{Watch, Watched};
use crate::sim::Belady;

/// The bound of eviction: not a policy, because it knows when sessions come back. Only closed loops have one.
pub const BELADY: &str = "native:belady";

/// Most linear memory of a component, MiB: enough for one that brings an interpreter.
const MEMORY_MIB: u32 = 256;

/// A policy as it is named: `output-first` or `native:output-first`, the path of a component, and its options behind it as one
/// JSON object: `pascal{"tpot_ms": 40}`.
///
/// ```
/// use meridian_bench::policies::PolicyArg;
///
/// let source: PolicyArg = "pascal{\"quantum_tokens\": 250}".parse().unwrap();
/// assert_eq!((source.source.as_str(), source.label.as_str()), ("native:pascal", "pascal{\"quantum_tokens\": 250}"));
/// assert_eq!("folder/mine.wasm".parse::<PolicyArg>().unwrap().label, "mine.wasm");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyArg {
    /// `native:NAME`, a path, or `oci://HOST/NAME@sha256:DIGEST`.
    pub source: String,
    /// One JSON object.
    pub options: String,
    /// For tables: without folders.
    pub label: String,
}

impl PolicyArg {
    /// The name of the policy: without `native:`, folders, `.wasm` and options.
    #[must_use]
    pub fn name(&self) -> &str {
        let source = PolicySource::of(&self.source);
        let last = source.native().unwrap_or(&self.source).rsplit('/').next().unwrap_or_default();
        last.strip_suffix(".wasm").unwrap_or(last)
    }
}

impl std::str::FromStr for PolicyArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, options) = text.find('{').map_or((text, "{}"), |at| text.split_at(at));
        let parsed: Result<serde_json::Map<String, serde_json::Value>, _> = serde_json::from_str(options);
        if let Err(error) = parsed {
            return Err(format!("{options}: {error}, expected the policy's options as one JSON object"));
        }
        if name.is_empty() {
            return Err("expected native:NAME, the path of a .wasm component or oci://HOST/NAME@sha256:DIGEST".into());
        }
        let named = PolicySource::of(name);
        if let Some(reference) = named.registry() {
            let reference = OciReference::pinned(reference).map_err(|error| error.to_string())?;
            let word = reference.repository().rsplit('/').next().unwrap_or_default();
            let label = format!("{word}{}", options.strip_suffix("{}").unwrap_or(options));
            return Ok(Self { source: name.to_owned(), options: options.to_owned(), label });
        }
        let is_component = Path::new(name).extension().is_some_and(|extension| extension == "wasm");
        let shown = options.strip_suffix("{}").unwrap_or(options);
        let (source, short) = if is_component {
            let file = Path::new(name).file_name().map(|file| file.to_string_lossy().into_owned());
            (name.to_owned(), file.unwrap_or_default())
        } else {
            let name = named.native().unwrap_or(name);
            (PolicySource::Native(name).to_string(), name.to_owned())
        };
        Ok(Self { source, options: options.to_owned(), label: format!("{short}{shown}") })
    }
}

/// The policies of one run as they are named: that of the dispatch slot alone, or a list of `SLOT=POLICY`:
/// `dispatch=srpt,eviction=prefix-value{"cap": 3},budget=patience`. A slot that is not in it has what the run gives to all.
/// `handoff=6:2` parts the engines: six think, two answer.
///
/// ```
/// use meridian_bench::policies::PolicySet;
///
/// let set: PolicySet = "eviction=prefix-value{\"cap\": 3},dispatch=srpt".parse().unwrap();
/// assert_eq!(set.dispatch.unwrap().source, "native:srpt");
/// assert_eq!(set.label, "srpt, eviction prefix-value{\"cap\": 3}");
/// assert_eq!("pascal".parse::<PolicySet>().unwrap().label, "pascal");
/// let parted: PolicySet = "dispatch=fcfs,handoff=6:2".parse().unwrap();
/// assert_eq!((parted.handoff, parted.label.as_str()), (Some([6, 2]), "fcfs, handoff 6:2"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicySet {
    /// Order, budget and caps of a step.
    pub dispatch: Option<PolicyArg>,
    /// Order of eviction.
    pub eviction: Option<PolicyArg>,
    /// Thinking budgets.
    pub budget: Option<PolicyArg>,
    /// Engines that think and engines that answer; without it, every engine does both.
    pub handoff: Option<[u32; 2]>,
    /// For tables: without folders.
    pub label: String,
}

impl std::str::FromStr for PolicySet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let slot_of = |part: &str| {
            let (name, policy) = part.split_once('=')?;
            let slot = SlotName::ALL.into_iter().find(|slot| slot.label() == name.trim())?;
            Some((slot, policy.trim().to_owned()))
        };
        let mut set = Self { dispatch: None, eviction: None, budget: None, handoff: None, label: String::new() };
        if slot_of(text).is_none() && !text.starts_with(HANDOFF) {
            let policy: PolicyArg = text.parse()?;
            return Ok(Self { label: policy.label.clone(), dispatch: Some(policy), ..set });
        }
        for part in parts(text) {
            if let Some(engines) = part.trim().strip_prefix(HANDOFF) {
                if set.handoff.replace(think_and_answer(engines)?).is_some() {
                    return Err(format!("{part}: handoff is given twice, expected one"));
                }
                continue;
            }
            let (slot, policy) = slot_of(part).ok_or_else(|| {
                format!("{part}: expected dispatch=POLICY, eviction=POLICY, budget=POLICY or handoff=THINK:ANSWER")
            })?;
            let place = match slot {
                SlotName::Dispatch => &mut set.dispatch,
                SlotName::Eviction => &mut set.eviction,
                SlotName::Budget => &mut set.budget,
            };
            if place.is_some() {
                return Err(format!("{part}: {} is given twice, expected one policy a slot", slot.label()));
            }
            *place = Some(policy.parse().map_err(|why| format!("{}: {why}", slot.label()))?);
        }
        let named =
            |slot: &str, policy: &Option<PolicyArg>| policy.as_ref().map(|policy| format!("{slot}{}", policy.label));
        let labels = [named("", &set.dispatch), named("eviction ", &set.eviction), named("budget ", &set.budget)];
        let handoff = set.handoff.map(|[think, answer]| format!("handoff {think}:{answer}"));
        set.label = labels.into_iter().flatten().chain(handoff).collect::<Vec<_>>().join(", ");
        Ok(set)
    }
}

/// Before the engines of a handoff in a [`PolicySet`].
const HANDOFF: &str = "handoff=";

fn think_and_answer(text: &str) -> Result<[u32; 2], String> {
    let numbers =
        text.trim().split_once(':').and_then(|(think, answer)| Some([think.parse().ok()?, answer.parse().ok()?]));
    let expected = || format!("handoff={text}: expected two numbers of engines from 1 on, such as 6:2");
    numbers.filter(|numbers: &[u32; 2]| !numbers.contains(&0)).ok_or_else(expected)
}

/// The parts between commas that are in no JSON.
fn parts(text: &str) -> Vec<&str> {
    let (mut depth, mut in_string, mut is_escaped, mut start) = (0_usize, false, false, 0);
    let mut parts = Vec::new();
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if in_string => is_escaped = true,
            '"' if depth > 0 => in_string = !in_string,
            _ if in_string => {}
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

/// The policy that a configuration names for a slot, also one in shadow.
///
/// # Errors
/// Its name is none of a policy.
pub fn configured(config: &MeridianConfig, slot: SlotName) -> anyhow::Result<PolicyArg> {
    let policy = &config.policy;
    let slot = match slot {
        SlotName::Dispatch => &policy.dispatch,
        SlotName::Eviction => &policy.eviction,
        SlotName::Budget => &policy.budget,
    };
    let options = serde_json::to_string(&slot.config)?;
    format!("{}{options}", slot.source).parse().map_err(anyhow::Error::msg)
}

/// The eviction policy that decides in an engine with this configuration.
fn deciding(config: &MeridianConfig) -> anyhow::Result<PolicyArg> {
    match config.policy.eviction.mode {
        SlotMode::Active => configured(config, SlotName::Eviction),
        SlotMode::Shadow => config.policy.eviction.deciding::<Eviction>().parse().map_err(anyhow::Error::msg),
    }
}

/// A fault to inject: its kind and how often.
///
/// ```
/// let inject: meridian_bench::policies::Inject = "trap:0.01".parse().unwrap();
/// assert_eq!(inject.share, 0.01);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Inject {
    /// What the policy seems to do.
    pub kind: FaultKind,
    /// Share of the decisions, 0 to 1.
    pub share: f64,
}

impl std::str::FromStr for Inject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            let kinds: Vec<_> = FaultKind::ALL.iter().map(|kind| kind.label()).collect();
            format!("{text}: expected KIND:SHARE, a share from 0 to 1 and a kind of {}", kinds.join(", "))
        };
        let (kind, share) = text.split_once(':').ok_or_else(expected)?;
        let kind = FaultKind::ALL.into_iter().find(|known| known.label() == kind).ok_or_else(expected)?;
        let share: f64 = share.parse().map_err(|_| expected())?;
        if !(0.0..=1.0).contains(&share) {
            return Err(expected());
        }
        Ok(Self { kind, share })
    }
}

/// Faults in a share of the decisions; the policy behind it recovers as it would.
struct Injecting {
    policy: Box<dyn Policy>,
    inject: Inject,
    random: Pcg64,
}

impl Policy for Injecting {
    fn description(&self) -> &Description {
        self.policy.description()
    }

    fn inputs(&self) -> &[meridian_core::Column] {
        self.policy.inputs()
    }

    fn decide(&mut self, batch: &Batch<'_>, decision: &mut meridian_core::Decision) -> Result<(), Fault> {
        if self.random.random::<f64>() < self.inject.share {
            return Err(Fault::new(self.inject.kind, "injected"));
        }
        self.policy.decide(batch, decision)
    }

    fn recover(&mut self) -> Result<(), Fault> {
        self.policy.recover()
    }

    fn start_anew(&mut self) -> Result<(), Fault> {
        self.policy.start_anew()
    }

    fn snapshot(&mut self) -> Result<Vec<u8>, Fault> {
        self.policy.snapshot()
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Fault> {
        self.policy.restore(state)
    }
}

/// Loads policies; a component is compiled once.
pub struct Loader {
    components: Components,
    config: MeridianConfig,
    opened: Vec<(String, Origin)>,
    watches: Vec<Watch>,
}

impl Loader {
    /// With the targets and slots of `config`.
    #[must_use]
    pub fn new(config: MeridianConfig) -> Self {
        Self { components: Components::default(), config, opened: Vec::new(), watches: Vec::new() }
    }

    /// The faults of each component loaded since this was called last.
    pub fn take_watches(&mut self) -> Vec<Watch> {
        std::mem::take(&mut self.watches)
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &MeridianConfig {
        &self.config
    }

    /// The slots that a policy fills.
    ///
    /// # Errors
    /// The source, and why it is refused.
    pub fn slots(&mut self, source: &PolicyArg) -> anyhow::Result<Vec<SlotName>> {
        Ok(self.open(&source.source)?.slots()?)
    }

    /// A policy of slot `K`, started.
    ///
    /// # Errors
    /// The source, and why it is refused.
    pub fn load<K: GuestKind>(&mut self, source: &PolicyArg) -> anyhow::Result<Contender<K>> {
        let PolicyArg { source, options, label } = source;
        // Simulated time does not pass while a policy decides, and a deadline in real time would make runs differ.
        let slots = &self.config.policy;
        let slot = match K::NAME {
            SlotName::Dispatch => &slots.dispatch,
            SlotName::Eviction => &slots.eviction,
            SlotName::Budget => &slots.budget,
        };
        let slot = SlotConfig { memory_mib: MEMORY_MIB, ..slot.clone() };
        let terms = Terms::unhurried(&slot, self.config.scheduler.targets());
        let deadline = Duration::from_secs_f32(slot.deadline_ms / 1e3);
        let origin = self.open(source)?.clone();
        let mut policy = origin.policy::<K>(terms, options)?;
        if origin.component().is_some() {
            let watch = Watch::new(K::NAME, label, deadline);
            self.watches.push(watch.clone());
            policy = Box::new(Watched { policy, watch });
        }
        Ok(origin.contender(policy, terms, options))
    }

    fn open(&mut self, source: &str) -> anyhow::Result<&Origin> {
        let at = match self.opened.iter().position(|(known, _)| known == source) {
            Some(at) => at,
            None => {
                let opened = self.components.open(source, Path::new(""));
                let origin = opened.context("a policy cannot be loaded (`make policies` builds the shipped ones)")?;
                self.opened.push((source.to_owned(), origin));
                self.opened.len() - 1
            }
        };
        Ok(&self.opened[at].1)
    }

    fn slot<K: GuestKind>(&self, contender: Contender<K>) -> PolicySlot<K> {
        PolicySlot::with_version(contender, self.config.scheduler.targets(), strike_limits(&self.config))
    }

    /// A dispatch policy that faults in a share of its decisions.
    ///
    /// # Errors
    /// As [`Loader::load`].
    pub fn dispatch(
        &mut self,
        source: &PolicyArg,
        inject: Option<Inject>,
        seed: u64,
    ) -> anyhow::Result<Contender<Dispatch>> {
        let mut contender = self.load::<Dispatch>(source)?;
        contender.warm_up().with_context(|| source.source.clone())?;
        if let Some(inject) = inject {
            let random = Pcg64::seed_from_u64(seed);
            contender.policy = Box::new(Injecting { policy: contender.policy, inject, random });
        }
        Ok(contender)
    }
}

/// The policies of one simulated engine.
pub struct Policies {
    pub(crate) dispatch: DispatchSlot,
    pub(crate) eviction: EvictionSlot,
    pub(crate) budget: BudgetSlot,
    /// The budget policy can end thinking.
    pub(crate) ends_thinking: bool,
    /// In place of the eviction policy, where cached blocks are ranked.
    pub(crate) belady: Option<Belady>,
    labels: [Option<String>; 3],
    pub(crate) config: MeridianConfig,
    /// The engine is stock vLLM: nothing of Meridian has a say.
    pub(crate) is_stock: bool,
    pub(crate) evicts_dead_thinking: bool,
}

/// Which policies an engine has.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Order, budget and caps of a step. `native:fcfs` is stock vLLM.
    pub dispatch: PolicyArg,
    /// Order of eviction; the configured one when absent.
    pub eviction: Option<PolicyArg>,
    /// Thinking budgets: absent, nothing ends thinking early.
    pub budget: Option<PolicyArg>,
    /// Faults of the dispatch policy.
    pub inject: Option<Inject>,
}

impl Policies {
    /// Load them.
    ///
    /// # Errors
    /// The source, and why it is refused.
    pub fn load(loader: &mut Loader, choice: &Choice, seed: u64) -> anyhow::Result<Self> {
        let dispatch = loader.dispatch(&choice.dispatch, choice.inject, seed)?;
        let eviction_source = match &choice.eviction {
            Some(source) => source.clone(),
            None => deciding(loader.config())?,
        };
        let knows_future = eviction_source.source == BELADY;
        let decides = if knows_future { deciding(loader.config())? } else { eviction_source.clone() };
        let eviction = loader.load::<Eviction>(&decides)?;
        let budget = match &choice.budget {
            Some(source) => loader.load::<Budget>(source)?,
            // It is asked nothing.
            None => {
                let source = loader.config().policy.budget.deciding::<Budget>();
                Contender::new(native::default_policy(loader.config().scheduler.targets()), "", source)
            }
        };
        let config = loader.config().clone();
        let mut stock = config.clone();
        stock.policy.dispatch.source.clone_from(&choice.dispatch.source);
        stock.policy.dispatch.mode = SlotMode::Active;
        // Stock vLLM knows no service levels.
        stock.service_levels.clear();
        // As in an engine with this configuration.
        let is_stock =
            stock.asks_for_stock() && choice.inject.is_none() && choice.eviction.is_none() && choice.budget.is_none();
        Ok(Self {
            is_stock,
            evicts_dead_thinking: config.kv_memory.enabled && config.evicts_dead_thinking() == Some(true),
            dispatch: loader.slot(dispatch),
            eviction: loader.slot(eviction),
            budget: loader.slot(budget),
            ends_thinking: choice.budget.is_some(),
            belady: knows_future.then(Belady::default),
            labels: [
                Some(choice.dispatch.label.clone()),
                Some(eviction_source.label),
                choice.budget.as_ref().map(|source| source.label.clone()),
            ],
            config: if is_stock { stock } else { config },
        })
    }

    /// Who decides in each slot, for tables.
    pub(crate) fn by_slot(&self) -> BTreeMap<String, String> {
        let [dispatch, eviction, budget] = self.labels.clone();
        let own = "vLLM's own";
        let eviction = eviction.filter(|_| !self.is_stock && self.config.kv_memory.enabled);
        let names = [dispatch, eviction.or(Some(own.into())), budget.or(Some("none".into()))];
        SlotName::ALL.iter().zip(names).filter_map(|(slot, name)| Some((slot.label().to_owned(), name?))).collect()
    }
}
