//! A fleet that is played in memory, on a clock of its own.

use std::collections::BTreeSet;
use std::panic::panic_any;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use meridian_core::SlotName;
use meridian_core::latency::LatencyCounts;
use meridian_engine::control::{
    LatencyReport, Mode, ProcessStatus, ShadowStatus, SlotStatus, StateHandover, SwapReport, UNCHANGED, Version,
};
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use rand_pcg::Pcg64;

use super::super::runner::Waits;
use super::super::*;
use crate::{Member, MemberError, NamedPolicy, PolicyOrigin};

pub(super) const SLOT: SlotName = SlotName::Dispatch;
pub(super) const OLD: &str = "native:fcfs";
pub(super) const NEW: &str = "native:srpt";

/// An engine that is only played.
pub(super) struct Played {
    pub(super) name: String,
    pub(super) fleet: Arc<World>,
    pub(super) inner: Mutex<Inner>,
    /// Whether calls are answered only once it goes on.
    hangs: Mutex<bool>,
    goes_on: Condvar,
}

pub(super) struct Inner {
    pub(super) is_up: bool,
    pub(super) run: u32,
    pub(super) started_s: f64,
    pub(super) active: Version,
    pub(super) previous: Option<Version>,
    pub(super) shadow: Option<(Version, u64)>,
    pub(super) quarantine: Option<Version>,
    pub(super) faults: u64,
    pub(super) counts: LatencyCounts,
    pub(super) random: Pcg64,
    /// Its own level, as a logarithm.
    pub(super) level: f64,
    pub(super) refuses: bool,
}

/// Something that happens.
pub(super) type Event = Box<dyn Fn(&World) + Send>;

/// The fleet, its time, and the policies' effects.
#[derive(Default)]
pub(super) struct World {
    pub(super) now_s: Mutex<f64>,
    /// What the machine's clock was set forward by, in all; the time that passes does not know it.
    pub(super) set_by_s: Mutex<f64>,
    pub(super) engines: Mutex<Vec<Arc<Played>>>,
    pub(super) hidden: Mutex<BTreeSet<String>>,
    /// Gaps of the new policy as a multiple of those of the old one.
    pub(super) effect: Mutex<f64>,
    pub(super) messages: AtomicU64,
    /// The call at which the controller is killed.
    pub(super) killed_at: AtomicU64,
    pub(super) is_killed: AtomicBool,
    /// What happens as time passes.
    pub(super) script: Mutex<Vec<(f64, Event)>>,
}

/// The controller is killed.
pub(super) struct Killed;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn version(source: &str) -> Version {
    let name = source.trim_start_matches("native:").to_owned();
    Version { name, version: "1".into(), source: source.into(), options: "{}".into(), ..Version::default() }
}

pub(super) fn played(fleet: &Arc<World>, name: &str, seed: u64) -> Arc<Played> {
    let mut random = Pcg64::seed_from_u64(seed);
    let level: f64 = StandardNormal.sample(&mut random);
    let inner = Inner {
        is_up: true,
        run: 1,
        started_s: *lock(&fleet.now_s),
        active: version(OLD),
        previous: None,
        shadow: None,
        quarantine: None,
        faults: 0,
        counts: LatencyCounts::default(),
        random,
        level: 0.3 * level,
        refuses: false,
    };
    Arc::new(Played {
        name: name.into(),
        fleet: Arc::clone(fleet),
        inner: Mutex::new(inner),
        hangs: Mutex::new(false),
        goes_on: Condvar::new(),
    })
}

impl World {
    pub(super) fn new(engines: usize) -> Arc<Self> {
        let world = Arc::new(Self { effect: Mutex::new(1.0), ..Self::default() });
        *lock(&world.now_s) = 1000.0;
        let all = (0..engines).map(|i| played(&world, &format!("e{i}"), i as u64)).collect();
        *lock(&world.engines) = all;
        world
    }

    pub(super) fn at(&self, seconds: f64, what: impl Fn(&World) + Send + 'static) {
        lock(&self.script).push((1000.0 + seconds, Box::new(what)));
    }

    pub(super) fn engine(&self, name: &str) -> Arc<Played> {
        Arc::clone(lock(&self.engines).iter().find(|engine| engine.name == name).expect("an engine"))
    }

    pub(super) fn pass(&self, seconds: f64) {
        let now_s = {
            let mut now_s = lock(&self.now_s);
            *now_s += seconds;
            *now_s
        };
        let due: Vec<_> = {
            let script = &mut *lock(&self.script);
            script.extract_if(.., |(at_s, _)| *at_s <= now_s).collect()
        };
        due.into_iter().for_each(|(_, what)| what(self));
        let effect = *lock(&self.effect);
        for engine in lock(&self.engines).iter() {
            let inner = &mut *lock(&engine.inner);
            if !inner.is_up {
                continue;
            }
            let noise: f64 = StandardNormal.sample(&mut inner.random);
            let factor = if inner.active.source == NEW { effect } else { 1.0 };
            let level = 20.0 * factor * (inner.level + 0.02 * noise).exp();
            let tokens = (100.0 * seconds) as u32;
            let gaps = (0..tokens).map(|i| level * (0.8 + 0.4 * f64::from(i) / f64::from(tokens.max(1)))).collect();
            inner.counts.merge(&LatencyCounts {
                output_itl: gaps,
                output_tokens: u64::from(tokens),
                ..LatencyCounts::default()
            });
        }
    }

    pub(super) fn actives(&self) -> BTreeSet<String> {
        lock(&self.engines).iter().map(|engine| lock(&engine.inner).active.source.clone()).collect()
    }

    pub(super) fn has_shadows(&self) -> bool {
        lock(&self.engines).iter().any(|engine| lock(&engine.inner).shadow.is_some())
    }
}

impl Played {
    fn with<T>(&self, call: impl FnOnce(&mut Inner) -> Result<T, MemberError>) -> Result<T, MemberError> {
        let number = self.fleet.messages.fetch_add(1, Ordering::SeqCst) + 1;
        let killed_at = self.fleet.killed_at.load(Ordering::SeqCst);
        if killed_at > 0 && number >= killed_at {
            self.fleet.is_killed.store(true, Ordering::SeqCst);
        }
        if self.fleet.is_killed.load(Ordering::SeqCst) {
            // Half of the time after the change was carried out.
            if killed_at.is_multiple_of(2) {
                let _ = call(&mut lock(&self.inner));
            }
            panic_any(Killed);
        }
        self.hold();
        let answer = {
            let inner = &mut *lock(&self.inner);
            if inner.is_up {
                call(inner)
            } else {
                Err(MemberError::Unreachable(format!("{}: does not answer", self.name)))
            }
        };
        // It may have stopped after the change, and before the answer.
        self.hold();
        answer
    }

    fn hold(&self) {
        let hangs = self.goes_on.wait_while(lock(&self.hangs), |hangs| *hangs);
        drop(hangs.unwrap_or_else(PoisonError::into_inner));
    }

    /// As SIGSTOP and SIGCONT do.
    pub(super) fn hang(&self, hangs: bool) {
        *lock(&self.hangs) = hangs;
        self.goes_on.notify_all();
    }

    pub(super) fn restart(&self) {
        let inner = &mut *lock(&self.inner);
        inner.run += 1;
        inner.is_up = true;
        inner.started_s = *lock(&self.fleet.now_s);
        (inner.active, inner.previous, inner.shadow, inner.quarantine) = (version(OLD), None, None, None);
        (inner.faults, inner.counts) = (0, LatencyCounts::default());
    }

    pub(super) fn fault(&self) {
        lock(&self.inner).faults += 1;
    }

    pub(super) fn quarantine(&self) {
        let inner = &mut *lock(&self.inner);
        let stand_in = inner.previous.take().expect("a version before");
        inner.quarantine = Some(std::mem::replace(&mut inner.active, stand_in));
    }
}

impl Inner {
    pub(super) fn install(&mut self, version: Version) {
        self.previous = Some(std::mem::replace(&mut self.active, version));
    }

    fn report(&self, action: &str) -> SwapReport {
        SwapReport {
            slot: SLOT,
            action: action.into(),
            active: self.active.clone(),
            previous: self.previous.clone().unwrap_or_default(),
            state: StateHandover::Stateless,
            held_us: 1.0,
        }
    }
}

pub(super) fn refused<T>(why: &str) -> Result<T, MemberError> {
    Err(MemberError::Refused(why.into()))
}

impl Member for Played {
    fn name(&self) -> &str {
        &self.name
    }

    fn status(&self) -> Result<ProcessStatus, MemberError> {
        self.with(|inner| {
            let shadow = inner.shadow.as_ref().map(|(version, faults)| ShadowStatus {
                version: version.clone(),
                faults: *faults,
                ..ShadowStatus::default()
            });
            let slot = SlotStatus {
                slot: SLOT,
                active: inner.active.clone(),
                previous: inner.previous.clone(),
                shadow,
                quarantine: inner.quarantine.clone().map(|version| (version, 1000.0)),
                decisions: [0; 3],
                deciding_s: [0.0; 3],
                deciding_buckets: [[0; 13]; 3],
                faults: vec![("trap".into(), inner.faults), ("load".into(), 7)],
                strikes: 0,
                idle_plans: 0,
                swaps: 0,
                last_refusal: None,
            };
            Ok(ProcessStatus { slots: vec![slot], ..ProcessStatus::default() })
        })
    }

    fn latency(&self) -> Result<LatencyReport, MemberError> {
        let now_s = *lock(&self.fleet.now_s);
        self.with(|inner| {
            let (run, uptime_s) = (format!("run-{}", inner.run), now_s - inner.started_s);
            Ok(LatencyReport { run, uptime_s, counts: inner.counts.clone() })
        })
    }

    fn put(&self, _: SlotName, policy: &NamedPolicy, mode: Mode) -> Result<SwapReport, MemberError> {
        let PolicyOrigin::Named(source) = &policy.source else { return refused("only names") };
        let given = version(source);
        self.with(|inner| {
            if inner.refuses && source == NEW {
                return refused("e: not a policy");
            }
            match mode {
                Mode::Shadow => inner.shadow = Some((given, 0)),
                Mode::Active if inner.active == given && inner.quarantine.is_none() => {
                    return Ok(inner.report(UNCHANGED));
                }
                Mode::Active => {
                    inner.quarantine = None;
                    inner.install(given);
                }
            }
            Ok(inner.report("swap"))
        })
    }

    fn promote(&self, _: SlotName) -> Result<SwapReport, MemberError> {
        self.with(|inner| match inner.shadow.take() {
            Some((version, _)) => {
                inner.install(version);
                Ok(inner.report("promote"))
            }
            None => refused("there is no shadow to promote"),
        })
    }

    fn rollback(&self, _: SlotName) -> Result<SwapReport, MemberError> {
        self.with(|inner| {
            let quarantined = inner.quarantine.take();
            match (inner.previous.take(), quarantined) {
                (Some(previous), _) => inner.install(previous),
                (None, Some(quarantined)) => inner.previous = Some(quarantined),
                (None, None) => return refused("there is no previous version"),
            }
            Ok(inner.report("rollback"))
        })
    }

    fn stop_shadow(&self, _: SlotName) -> Result<SwapReport, MemberError> {
        self.with(|inner| match inner.shadow.take() {
            Some(_) => Ok(inner.report("stop-shadow")),
            None => refused("there is no shadow to stop"),
        })
    }
}

pub(super) struct Time(Arc<World>);

impl Clock for Time {
    fn now_s(&self) -> f64 {
        *lock(&self.0.now_s) + *lock(&self.0.set_by_s)
    }

    fn wait(&self, seconds: f64) -> f64 {
        self.0.pass(seconds);
        seconds
    }
}

pub(super) struct Listed(Arc<World>);

impl Roster for Listed {
    fn members(&self) -> Result<Vec<Arc<dyn Member>>, String> {
        let hidden = lock(&self.0.hidden);
        let engines = lock(&self.0.engines);
        Ok(engines
            .iter()
            .filter(|engine| !hidden.contains(&engine.name))
            .map(|engine| Arc::clone(engine) as Arc<dyn Member>)
            .collect())
    }
}

/// How long to wait for engines in memory, which answer at once or hang.
pub(super) fn waits(time: Duration) -> Waits {
    Waits { look: time, change: time, round: time }
}

/// The folder of a test, empty.
pub(super) fn folder(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("meridian-rollout-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    dir
}

/// Ten intervals of 2 seconds; a guard of 5 %.
pub(super) fn settings() -> RolloutSettings {
    let mut settings = RolloutSettings::new(SLOT, "20%,50%,100%", 20.0).expect("settings");
    settings.guards = vec!["output_itl_p90<=1.05x".parse().expect("a guard")];
    settings
}

pub(super) struct Play<'a> {
    pub(super) world: &'a Arc<World>,
    pub(super) dir: PathBuf,
    /// Long, unless engines hang: a busy machine is no engine that does not answer.
    pub(super) waits: Waits,
}

/// What a roll-out came to.
pub(super) fn ended(result: Result<Outcome, RolloutError>) -> Outcome {
    result.expect("it goes on to its end")
}

impl Play<'_> {
    pub(super) fn begin(&self, settings: RolloutSettings) -> Result<Outcome, RolloutError> {
        let (roster, clock) = (Listed(Arc::clone(self.world)), Time(Arc::clone(self.world)));
        let policy = NewPolicy { source: NEW.into(), ..NewPolicy::default() };
        let told = &mut |_: &RolloutState| {};
        let start = Start {
            settings,
            policy,
            component: None,
            fleet: Vec::new(),
            predicted: None,
            roster: &roster,
            clock: &clock,
            told,
        };
        let mut rollout = Rollout::begin(Store::lock(&self.dir)?, start)?;
        rollout.waits = self.waits;
        rollout.run()
    }

    pub(super) fn reopen(&self) -> Result<Outcome, RolloutError> {
        self.reopen_and(|_| ())
    }

    /// Go on with a wish.
    pub(super) fn reopen_and(&self, wish: impl FnOnce(&mut Rollout<'_>)) -> Result<Outcome, RolloutError> {
        let (roster, clock) = (Listed(Arc::clone(self.world)), Time(Arc::clone(self.world)));
        let told = &mut |_: &RolloutState| {};
        let mut rollout = reopen(&self.dir, &roster, &clock, told)?;
        rollout.waits = self.waits;
        wish(&mut rollout);
        rollout.run()
    }

    pub(super) fn state(&self) -> RolloutState {
        read(&self.dir).expect("a state")
    }

    pub(super) fn events(&self) -> String {
        self.state().events.iter().map(|event| format!("{}\n", event.what)).collect()
    }
}

impl Drop for Play<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

pub(super) fn play<'a>(world: &'a Arc<World>, name: &str) -> Play<'a> {
    Play { world, dir: folder(name), waits: waits(Duration::from_secs(60)) }
}

pub(super) fn only(source: &str) -> BTreeSet<String> {
    BTreeSet::from([source.to_owned()])
}
