//! The controller: what waits for a compile, which order holds, and what is no new version.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;
use std::time::Duration;

use meridian_core::slot::{BudgetSlot, Contender, DispatchSlot, PolicySlot, StrikeLimits};
use meridian_core::{MeridianConfig, SlotKind, Targets, native};
use meridian_engine::control::{
    Control, ControlError, Given, MAX_OPTIONS_BYTES, Mode, ProcessStatus, SlotName, SwapReport, UNCHANGED, Upload,
};
use meridian_engine::{ControlledSlot, Controller, Loader, Refusal};
use sha2::{Digest, Sha256};

/// What a hang is told by; nothing waits as long.
const HANG: Duration = Duration::from_secs(60);

fn targets() -> Targets {
    MeridianConfig::default().scheduler.targets()
}

/// Loads natives at once. For a component it says that it has begun, and waits to be told how it ends.
struct Told {
    begun: Sender<()>,
    ends: Mutex<Receiver<Option<Refusal>>>,
}

fn native<K: SlotKind>(name: &str, options: &str) -> Result<Contender<K>, String> {
    let policy = native::policy(name, targets(), options).map_err(|error| error.to_string())?;
    Ok(Contender::new(policy, "", &format!("native:{name}")).with_options(options))
}

/// A component whose bytes are the name of a native policy.
fn component<K: SlotKind>(bytes: &[u8], options: &str) -> Result<Contender<K>, String> {
    let name = String::from_utf8_lossy(bytes).into_owned();
    let sha256: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let policy = native::policy(&name, targets(), options).map_err(|error| error.to_string())?;
    let contender = Contender::new(policy, &sha256, "test").with_options(options);
    let remake = move |options: &str| native::policy(&name, targets(), options).map_err(|error| error.to_string());
    Ok(contender.with_remake(std::sync::Arc::new(remake)))
}

impl<K: SlotKind> Loader<K> for Told {
    fn load(&self, upload: &Upload<'_>) -> Result<Contender<K>, Refusal> {
        let options = upload.options.unwrap_or_default();
        let bytes = match upload.policy {
            Given::Component { bytes, .. } => bytes,
            Given::Native(name) => return Ok(native(name, options)?),
            Given::Fetched(fetched) => &fetched.bytes,
            Given::Active | Given::Remote(_) => panic!("the controller finds out which that is"),
        };
        self.begun.send(()).unwrap();
        match self.ends.lock().unwrap().recv().unwrap() {
            None => Ok(component(bytes, options)?),
            Some(refusal) => Err(refusal),
        }
    }
}

/// A dispatch and a budget slot, and what a test tells the loader of each.
struct Engine {
    controller: Controller,
    begun: Mutex<Receiver<()>>,
    end: Sender<Option<Refusal>>,
    budget_end: Sender<Option<Refusal>>,
}

fn engine() -> Engine {
    let (begun, has_begun) = channel();
    let told = |begun: &Sender<()>| {
        let (end, ends) = channel();
        (end, Box::new(Told { begun: begun.clone(), ends: Mutex::new(ends) }))
    };
    let limits = StrikeLimits::default();
    let slot: DispatchSlot = PolicySlot::with_version(native("fcfs", "{}").unwrap(), targets(), limits);
    let budget: BudgetSlot = PolicySlot::with_version(native("eat-rpdi", "{}").unwrap(), targets(), limits);
    let ((end, loader), (budget_end, budget_loader)) = (told(&begun), told(&begun));
    let controller =
        Controller::new(ControlledSlot { control: slot.control(), loader }, Box::new(ProcessStatus::default))
            .with_budget(ControlledSlot { control: budget.control(), loader: budget_loader });
    Engine { controller, begun: Mutex::new(has_begun), end, budget_end }
}

impl Engine {
    fn put(&self, slot: SlotName, upload: &Upload<'_>) -> Result<SwapReport, ControlError> {
        self.controller.put(slot, upload, Mode::Active)
    }

    /// Wait until a component is being loaded.
    fn has_begun(&self) {
        self.begun.lock().unwrap().recv_timeout(HANG).expect("it is loaded");
    }

    /// A component that loads at once.
    fn swap(&self, name: &str) -> SwapReport {
        self.end.send(None).unwrap();
        let report = self.put(SlotName::Dispatch, &Upload::component(name.as_bytes(), "test")).unwrap();
        self.has_begun();
        report
    }

    fn active(&self) -> String {
        self.controller.status().slots[0].active.name.clone()
    }
}

fn with<'a>(policy: Given<'a>, options: &'a str) -> Upload<'a> {
    Upload { policy, options: Some(options), source: "test" }
}

/// Run a call of which a test says that it waits for nothing; a hang fails it.
fn at_once<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    call: impl FnOnce() -> T + Send + 'scope,
) -> Option<T> {
    let (done, is_done) = channel();
    scope.spawn(move || {
        let _ = done.send(call());
    });
    is_done.recv_timeout(HANG).ok()
}

#[test]
fn a_transient_refusal_is_no_fault_of_the_candidate() {
    let engine = engine();
    let put = || engine.put(SlotName::Dispatch, &Upload::component(b"noop", "test"));
    let why = String::from("the compiler is busy");
    engine.end.send(Some(Refusal { why: why.clone(), is_transient: true })).unwrap();
    assert_eq!(put(), Err(ControlError::Busy(why.clone())));
    let last_refusal = || engine.controller.status().slots[0].last_refusal.clone();
    assert_eq!((engine.controller.faults().len(), last_refusal()), (0, None));
    engine.end.send(Some(why.clone().into())).unwrap();
    assert_eq!(put(), Err(ControlError::Refused(why)));
    assert_eq!(engine.controller.faults().len(), 1);
}

#[test]
fn nothing_changes_after_the_end() {
    let engine = engine();
    let put = || engine.put(SlotName::Dispatch, &Upload::component(b"noop", "test"));
    let ends = Err(ControlError::Busy("the engine ends".into()));
    std::thread::scope(|scope| {
        let compiling = scope.spawn(put);
        engine.has_begun();
        let waiting = scope.spawn(put);
        engine.controller.close();
        assert_eq!(waiting.join().unwrap(), ends);
        assert_eq!(put(), ends);
        assert_eq!(engine.controller.rollback(SlotName::Dispatch), ends);
        engine.end.send(None).unwrap();
        assert_eq!(compiling.join().unwrap(), ends);
    });
    assert_eq!(engine.controller.status().slots[0].swaps, 0);
}

/// What compiles nothing waits neither for a compile of another slot nor for one of its own.
type Call<'a> = Box<dyn FnOnce() -> Result<SwapReport, ControlError> + Send + 'a>;

#[test]
fn only_what_compiles_waits_for_a_compile() {
    let engine = engine();
    engine.swap("noop");
    let weighted = r#"{"prefill_weight":0.5}"#;
    std::thread::scope(|scope| {
        let compiling = scope.spawn(|| engine.put(SlotName::Budget, &Upload::component(b"patience", "test")));
        engine.has_begun();
        let controller = &engine.controller;
        let calls: [(&str, Call); 7] = [
            ("rollback", Box::new(|| controller.rollback(SlotName::Dispatch))),
            ("native", Box::new(|| engine.put(SlotName::Dispatch, &with(Given::Native("srpt"), "{}")))),
            ("options", Box::new(|| engine.put(SlotName::Dispatch, &with(Given::Active, weighted)))),
            ("unchanged", Box::new(|| engine.put(SlotName::Dispatch, &with(Given::Active, weighted)))),
            ("release", Box::new(|| controller.release(SlotName::Dispatch))),
            ("promote", Box::new(|| controller.promote(SlotName::Budget))),
            ("stop-shadow", Box::new(|| controller.stop_shadow(SlotName::Budget))),
        ];
        for (name, call) in calls {
            let done = at_once(scope, call);
            if done.is_none() {
                // So that the test ends.
                engine.budget_end.send(None).unwrap();
            }
            assert!(done.is_some(), "{name} waits for the compiler");
        }
        let active = engine.controller.status().slots[0].active.clone();
        assert_eq!((active.name.as_str(), active.options.as_str()), ("srpt", weighted));
        engine.budget_end.send(None).unwrap();
        assert_eq!(compiling.join().unwrap().unwrap().active.name, "patience");
    });
}

/// A component that is loaded for a slot is not put there after a change that was asked for later.
#[test]
fn a_later_change_overtakes_a_compile_of_its_slot() {
    let engine = &engine();
    engine.swap("noop");
    let overtaken = Err(ControlError::Overtaken(SlotName::Dispatch));
    std::thread::scope(|scope| {
        for (later, then) in [("rollback", "fcfs"), ("native", "srpt"), ("the same", "srpt"), ("none", "edf")] {
            let compiling = scope.spawn(|| engine.put(SlotName::Dispatch, &Upload::component(b"edf", "test")));
            engine.has_begun();
            match later {
                "rollback" => drop(engine.controller.rollback(SlotName::Dispatch).unwrap()),
                "native" | "the same" => {
                    drop(engine.put(SlotName::Dispatch, &with(Given::Native("srpt"), "{}")).unwrap())
                }
                _ => assert!(engine.controller.promote(SlotName::Dispatch).is_err(), "there is no shadow"),
            }
            engine.end.send(None).unwrap();
            let put = compiling.join().unwrap();
            assert_eq!(engine.active(), then);
            if later == "none" {
                assert_eq!(put.unwrap().active.name, "edf", "what was refused overtakes nothing");
            } else {
                assert_eq!(put, overtaken, "{later}");
            }
        }
        // A shadow is overtaken by its end, and by nothing that changes who decides.
        for (component, stops) in [("qoe", false), ("srpt", true)] {
            let upload = Upload::component(component.as_bytes(), "test");
            let compiling = scope.spawn(move || engine.controller.put(SlotName::Dispatch, &upload, Mode::Shadow));
            engine.has_begun();
            engine.controller.rollback(SlotName::Dispatch).unwrap();
            let stopped = stops.then(|| engine.controller.stop_shadow(SlotName::Dispatch).unwrap());
            engine.end.send(None).unwrap();
            assert_eq!(compiling.join().unwrap().is_ok(), stopped.is_none());
        }
        assert!(engine.controller.status().slots[0].shadow.is_none());
    });
}

/// Such as a caller and the watch of its file, which bring the same bytes.
#[test]
fn a_later_change_that_leads_to_the_same_policy_refuses_none() {
    let engine = &engine();
    engine.swap("noop");
    engine.swap("edf");
    std::thread::scope(|scope| {
        let compiling = scope.spawn(|| engine.put(SlotName::Dispatch, &Upload::component(b"noop", "test")));
        engine.has_begun();
        engine.controller.rollback(SlotName::Dispatch).unwrap();
        engine.end.send(None).unwrap();
        let report = compiling.join().unwrap().unwrap();
        assert_eq!((report.action.as_str(), report.active.name.as_str()), (UNCHANGED, "noop"));
    });
}

/// Otherwise the version before would be lost: a rollback would lead back to what is there.
#[test]
fn equal_bytes_with_equal_options_are_no_new_version() {
    let engine = engine();
    let put = |upload: &Upload<'_>| engine.put(SlotName::Dispatch, upload).unwrap();
    engine.swap("noop");
    // Whoever brings it, nothing is loaded.
    for source in ["admin", "/the/watched/file.wasm"] {
        let report = put(&Upload::component(b"noop", source));
        assert_eq!((report.action.as_str(), report.active.name.as_str()), (UNCHANGED, "noop"));
    }
    let slot = engine.controller.status().slots[0].clone();
    assert_eq!((slot.swaps, slot.previous.unwrap().name.as_str(), slot.active.source.as_str()), (1, "fcfs", "test"));
    assert_eq!(engine.controller.rollback(SlotName::Dispatch).unwrap().active.name, "fcfs");
    assert_eq!(put(&with(Given::Native("fcfs"), "{}")).action, UNCHANGED);
    // Other options are another version; the same in another order are not.
    let pascal = |options| put(&with(Given::Native("pascal"), options)).action;
    let actions = [
        pascal(r#"{"lead_tokens": 8.0, "quantum_tokens": 100}"#),
        pascal(r#"{ "quantum_tokens":100, "lead_tokens":8.0 }"#),
        pascal(r#"{"lead_tokens": 8.0}"#),
    ];
    assert_eq!(actions, ["swap", UNCHANGED, "swap"]);
    // In shadow it is compared with the shadow.
    let shadow = || engine.controller.put(SlotName::Dispatch, &with(Given::Native("edf"), "{}"), Mode::Shadow);
    assert_eq!([shadow().unwrap().action, shadow().unwrap().action], ["shadow", UNCHANGED]);
    assert_eq!(put(&with(Given::Native("edf"), "{}")).action, "swap");
}

#[test]
fn options_alone_make_a_version_and_a_rollback_returns_to_it() {
    let engine = engine();
    let put = |policy, options| engine.controller.put(SlotName::Budget, &with(policy, options), Mode::Active);
    let options = |report: &SwapReport| (report.previous.options.clone(), report.active.options.clone());
    let (first, second) = (r#"{"think_tokens":100}"#, r#"{"think_tokens":200}"#);
    for policy in [Given::Native("fixed-budget"), Given::Component { bytes: b"fixed-budget", signature: None }] {
        engine.budget_end.send(None).unwrap();
        put(policy, first).unwrap();
        let report = put(Given::Active, second).unwrap();
        assert_eq!(options(&report), (first.into(), second.into()));
        assert_eq!((&report.active.sha256, &report.active.source), (&report.previous.sha256, &report.previous.source));
        assert_eq!(put(Given::Active, second).unwrap().action, UNCHANGED);
        let back = engine.controller.rollback(SlotName::Budget).unwrap();
        assert_eq!(options(&back), (second.into(), first.into()));
    }
    // A swap between policies whose options differ.
    let refused = put(Given::Native("fixed-budget"), r#"{"answers":2}"#).unwrap_err();
    assert!(matches!(&refused, ControlError::Refused(why) if why.contains("answers")), "{refused}");
    assert_eq!(put(Given::Native("patience"), r#"{"answers":2}"#).unwrap().active.options, r#"{"answers":2}"#);
    for (options, why) in [
        ("[1]", "config: must be one JSON object: invalid type: sequence"),
        ("{", "config: must be one JSON object: EOF"),
        (&format!(r#"{{"a":"{}"}}"#, "x".repeat(MAX_OPTIONS_BYTES)), "bytes: must be at most 65536"),
    ] {
        let refused = put(Given::Native("patience"), options).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
}

#[test]
fn a_shadow_ends_when_it_is_stopped() {
    let engine = engine();
    let nothing = engine.controller.stop_shadow(SlotName::Dispatch).unwrap_err();
    assert_eq!(nothing.to_string(), "dispatch: there is no shadow to stop");
    engine.controller.put(SlotName::Dispatch, &with(Given::Native("edf"), "{}"), Mode::Shadow).unwrap();
    assert!(engine.controller.status().slots[0].shadow.is_some());
    let report = engine.controller.stop_shadow(SlotName::Dispatch).unwrap();
    assert_eq!((report.action.as_str(), report.active.name.as_str()), ("stop-shadow", "fcfs"));
    assert!(engine.controller.status().slots[0].shadow.is_none());
}
