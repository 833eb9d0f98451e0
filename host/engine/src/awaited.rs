//! The policies of the configuration that were not in the cache at the start: each is fetched on a thread of its own. Until
//! then the native default decides, or the policy is not compared.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use meridian_core::config::SlotMode;
use meridian_core::{SlotConfig, SlotName};

use crate::control::{Control, ControlError, Given, Mode, Upload, Version};

/// Pauses between two fetches that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchPace {
    /// Behind the first; each further one is twice as long.
    pub first: Duration,
    /// The longest.
    pub longest: Duration,
}

impl Default for FetchPace {
    fn default() -> Self {
        Self { first: Duration::from_secs(5), longest: Duration::from_secs(300) }
    }
}

/// A slot whose configured policy a registry has.
pub(crate) struct Awaited {
    slot: SlotName,
    source: String,
    mode: Mode,
}

impl Awaited {
    pub(crate) fn new(slot: SlotName, config: &SlotConfig) -> Self {
        let mode = match config.mode {
            SlotMode::Active => Mode::Active,
            SlotMode::Shadow => Mode::Shadow,
        };
        Self { slot, source: config.source.clone(), mode }
    }

    /// What happens until the policy is fetched.
    fn meanwhile(&self) -> &'static str {
        match self.mode {
            Mode::Active => "the native default decides",
            Mode::Shadow => "it is not compared",
        }
    }

    /// Problems of this kind, for the status.
    fn problem(&self, why: &str) -> String {
        let meanwhile = self.meanwhile();
        format!("policy.{}.source: {why}; {meanwhile} until it is fetched", self.slot.label())
    }
}

/// Fetches what the slots wait for. Dropping it ends the waiting; a fetch ends by itself and changes nothing.
#[derive(Default)]
pub(crate) struct Fetches {
    shared: Arc<Shared>,
}

/// The problem of each slot, in the order of [`SlotName::ALL`].
pub(crate) type Problems = Arc<Mutex<[Option<String>; SlotName::ALL.len()]>>;

#[derive(Default)]
struct Shared {
    is_over: Mutex<bool>,
    over: Condvar,
    problems: Problems,
}

impl Shared {
    fn is_over(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_problem(&self, slot: SlotName, problem: Option<String>) {
        self.problems.lock().unwrap_or_else(PoisonError::into_inner)[slot as usize] = problem;
    }

    /// False when it is over.
    fn pause(&self, pause: Duration) -> bool {
        let waited = self.over.wait_timeout_while(self.is_over(), pause, |is_over| !*is_over);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Fetches {
    pub(crate) fn start(
        awaited: Vec<Awaited>,
        control: &Arc<dyn Control>,
        pace: FetchPace,
        problems: Problems,
    ) -> Self {
        let shared = Arc::new(Shared { problems, ..Shared::default() });
        for awaited in awaited {
            let (control, in_thread) = (Arc::clone(control), Arc::clone(&shared));
            let (slot, source) = (awaited.slot, awaited.source.clone());
            tracing::info!(
                slot = slot.label(),
                source,
                "the configured policy is being fetched; {} until then",
                awaited.meanwhile()
            );
            shared.set_problem(slot, Some(awaited.problem(&format!("{source}: not fetched yet"))));
            let put = move || fetch(&awaited, &*control, pace, &in_thread);
            if let Err(why) = thread::Builder::new().name("meridian-await".into()).spawn(put) {
                tracing::warn!(slot = slot.label(), %why, "no thread to fetch the configured policy");
            }
        }
        Self { shared }
    }
}

impl Drop for Fetches {
    fn drop(&mut self) {
        *self.shared.is_over() = true;
        self.shared.over.notify_all();
    }
}

/// Until it is there, refused, or no longer wanted.
fn fetch(awaited: &Awaited, control: &dyn Control, pace: FetchPace, shared: &Shared) {
    let Awaited { slot, source, mode } = awaited;
    let before = present(control, *slot, *mode);
    let upload = Upload { policy: Given::Remote(source), options: None, source };
    let mut pause = pace.first;
    let problem = loop {
        match control.put(*slot, &upload, *mode) {
            Ok(_) | Err(ControlError::Overtaken(_) | ControlError::NoSuchSlot(_) | ControlError::Nothing { .. }) => {
                break None;
            }
            Err(ControlError::Refused(why)) => break Some(awaited.problem(&why)),
            Err(ControlError::Busy(why)) => shared.set_problem(*slot, Some(awaited.problem(&why))),
        }
        // Somebody chose another policy meanwhile.
        if !shared.pause(pause) || present(control, *slot, *mode) != before {
            break None;
        }
        pause = (pause * 2).min(pace.longest);
    };
    shared.set_problem(*slot, problem);
}

/// The version that the policy would take the place of.
fn present(control: &dyn Control, slot: SlotName, mode: Mode) -> Option<Version> {
    let status = control.status().slots.into_iter().find(|status| status.slot == slot)?;
    match mode {
        Mode::Active => Some(status.active),
        Mode::Shadow => Some(status.shadow?.version),
    }
}
