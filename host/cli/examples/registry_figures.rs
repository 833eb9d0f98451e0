//! Measures an engine that decides while components are pulled from a registry that fails in every way; one JSON object a
//! line.
//!
//!     cargo build --release --workspace --examples
//!     target/release/examples/registry_figures [PULLS]
//!
//! It needs the components: `make policies`.
#![expect(clippy::unwrap_used, reason = "a program of measurements ends at the first surprise")]

#[path = "../tests/support/registry.rs"]
mod registry_support;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use meridian_core::oci::OciReference;
use meridian_core::{EngineFacts, Markers, MeridianConfig, NewRequest, RowId, SlotName};
use meridian_engine::control::{Given, Mode, Upload};
use meridian_engine::{CompileCommand, Engine, RegistryLimits, Settings, compile_child, set_compile_command};
use meridian_registry::{Interfaces, Limits, Registry, Signing};
use meridian_wasm::sha256_of;
use registry_support::{DockerRegistry, Fault, Login, Proxy};

/// The argument with which this program starts itself to compile.
const COMPILE: &str = "compile";
/// Those that are pulled in turn.
const POLICIES: [&str; 5] = ["srpt", "edf", "fcfs", "priority", "mlfq"];
const LIMITS: RegistryLimits = RegistryLimits {
    connect: Duration::from_secs(1),
    silence: Duration::from_millis(100),
    total: Duration::from_secs(5),
    attempts: 3,
    backoff: Duration::from_millis(5),
    longest_backoff: Duration::from_millis(20),
};
const REQUESTS: usize = 64;
const SLOW: Duration = Duration::from_millis(1);
const WITHOUT: Duration = Duration::from_secs(10);

fn main() {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some(COMPILE) {
        std::process::exit(compile_child().into());
    }
    set_compile_command(CompileCommand::new("/proc/self/exe", [COMPILE]));
    let pulls = argument.map_or(100, |pulls| pulls.parse().expect("PULLS is a number"));
    let folder = tempfile::tempdir().unwrap();
    let registry = DockerRegistry::start(&folder.path().join("registry"), Login::None);
    let proxy = Proxy::before(Some(registry.address));
    let pushed = POLICIES.map(|policy| push(&proxy, policy));
    let settings = Settings {
        markers: Markers::new(vec![vec![7]], vec![vec![8]], vec![]).unwrap(),
        registry: LIMITS,
        ..Settings::default()
    };
    let engine = Engine::start(MeridianConfig::default(), settings).unwrap();
    let rows: Vec<RowId> = (0..REQUESTS)
        .map(|number| {
            let request = NewRequest { prompt: &[1, 2, 7], ..NewRequest::default() };
            let row = engine.drive().arrived(&format!("request-{number}"), &request, None).unwrap().row;
            engine.drive().admitted(row, 0);
            row
        })
        .collect();
    let measured = |meanwhile: &mut dyn FnMut()| {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let deciding = scope.spawn(|| decide(&engine, &rows, &is_over));
            meanwhile();
            is_over.store(true, Ordering::Relaxed);
            deciding.join().unwrap()
        })
    };
    let without = measured(&mut || std::thread::sleep(WITHOUT));
    let files = measured(&mut || put_all(&engine, &pushed, pulls));
    let mut pulled = Pulled::default();
    let with = measured(&mut || pulled = pull_all(&engine, &proxy, &pushed, pulls));
    let wrong = pulled.wrong + u32::from(active(&engine) != pulled.expected);
    let status = engine.control().status();
    let slot = status.slots.iter().find(|slot| slot.slot == SlotName::Dispatch).unwrap();
    let faults: u64 = slot.faults.iter().map(|(_, count)| count).sum();
    print(&format!("{pulls} pulls with faults: wrong policies active"), f64::from(wrong), "policies");
    print(&format!("{pulls} pulls with faults: succeeded at once"), f64::from(pulled.at_once), "pulls");
    print(&format!("{pulls} pulls with faults: succeeded after other attempts"), f64::from(pulled.in_the_end), "pulls");
    print(&format!("{pulls} pulls with faults: refused"), f64::from(pulled.refused), "pulls");
    print(&format!("{pulls} pulls with faults: faults of policies"), faults as f64, "faults");
    print("longest time that a swap held the slot", pulled.longest_hold_us, "us");
    for (when, steps) in
        [("without pulls", without), ("during swaps of files", files), ("during pulls and swaps", with)]
    {
        let figure =
            |what: &str, value: f64, unit| print(&what.replace("steps", &format!("steps {when}")), value, unit);
        figure("steps: number", steps.count as f64, "steps");
        figure("steps that waited longer than 1 ms for another thread", f64::from(steps.delayed), "steps");
        figure("steps: longest that waited for another thread", steps.longest_us, "us");
        figure("steps beyond 1 ms for any reason, the machine included", f64::from(steps.slow), "steps");
        let slow_of_a_million = f64::from(steps.slow) * 1e6 / steps.count as f64;
        figure("steps beyond 1 ms for any reason, of a million", slow_of_a_million, "steps");
        figure("steps: p99", steps.p99_us, "us");
    }
}

fn print(name: &str, value: f64, unit: &str) {
    println!("{}", serde_json::json!({ "name": name, "value": value, "unit": unit }));
}

/// A component in the registry.
struct Pushed {
    source: String,
    sha256: String,
    bytes: Vec<u8>,
}

/// Digest of the policy that decides.
fn active(engine: &Engine) -> String {
    let status = engine.control().status();
    status.slots.iter().find(|slot| slot.slot == SlotName::Dispatch).unwrap().active.sha256.clone()
}

/// The control: as many swaps of the same components without a registry.
fn put_all(engine: &Engine, pushed: &[Pushed], swaps: usize) {
    for Pushed { source, bytes, .. } in pushed.iter().cycle().take(swaps) {
        let upload = Upload { policy: Given::Component { bytes, signature: None }, options: None, source };
        engine.control().put(SlotName::Dispatch, &upload, Mode::Active).unwrap();
    }
}

fn push(proxy: &Proxy, policy: &str) -> Pushed {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../target/policies/{policy}.wasm"));
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}: run `make policies`", path.display()));
    let reference = OciReference::parse(&format!("oci://{}/{policy}:1", proxy.address)).unwrap();
    let registry = Registry::new(Limits::push());
    let source = registry.push(&reference, &bytes, &Interfaces::default(), &Signing::default()).unwrap();
    Pushed { source: source.without_tag().to_string(), sha256: sha256_of(&bytes), bytes }
}

#[derive(Default)]
struct Pulled {
    at_once: u32,
    in_the_end: u32,
    refused: u32,
    /// Swaps to or from another policy than the expected one.
    wrong: u32,
    /// Digest of the policy that should be active.
    expected: String,
    longest_hold_us: f64,
}

/// Put one component after the other into the dispatch slot, each over a registry that fails in another way.
fn pull_all(engine: &Engine, proxy: &Proxy, pushed: &[Pushed], pulls: usize) -> Pulled {
    let faults = [Fault::Stall, Fault::Status(500), Fault::WrongBytes, Fault::Truncated, Fault::Reset, Fault::Endless];
    let parts = ["/blobs/", "/manifests/"];
    let mut done = Pulled { expected: active(engine), ..Pulled::default() };
    for number in 0..pulls {
        // One that is not active.
        let Pushed { source, sha256, .. } = &pushed[number % pushed.len()];
        // Each fault for no request, for one, for two, and for all.
        let (fault, part) = (&faults[number % faults.len()], parts[number / faults.len() % parts.len()]);
        let times = [0, 1, 2, 3][number / (faults.len() * parts.len()) % 4];
        proxy.first(part, vec![fault.clone(); times]);
        let upload = Upload { policy: Given::Remote(source), options: None, source };
        match engine.control().put(SlotName::Dispatch, &upload, Mode::Active) {
            Ok(report) => {
                // It also says what was active before: what a refusal left there.
                let is_right = report.active.sha256 == *sha256 && report.previous.sha256 == done.expected;
                done.wrong += u32::from(!is_right);
                done.expected.clone_from(sha256);
                done.longest_hold_us = done.longest_hold_us.max(report.held_us);
                *(if times == 0 { &mut done.at_once } else { &mut done.in_the_end }) += 1;
            }
            Err(refused) => {
                eprintln!("  pull {number}: {fault:?} on {times} of {part}: {refused}");
                done.refused += 1;
            }
        }
        proxy.release();
    }
    done
}

struct Steps {
    count: usize,
    /// The thread slept, and the step took longer than 1 ms beside the time for which it was ready and had no core.
    delayed: u32,
    /// Longer than 1 ms, for whatever reason.
    slow: u32,
    p99_us: f64,
    longest_us: f64,
}

/// Steps of an engine, one after the other.
fn decide(engine: &Engine, rows: &[RowId], is_over: &AtomicBool) -> Steps {
    let waits = File::open("/proc/thread-self/schedstat").unwrap();
    let started = Instant::now();
    let (mut took_us, mut delayed, mut slow, mut longest) = (Vec::new(), 0, 0, Duration::ZERO);
    let tokens: Vec<_> = rows.iter().map(|row| (*row, 40)).collect();
    let given: Vec<_> = rows.iter().map(|row| (*row, 1)).collect();
    while !is_over.load(Ordering::Relaxed) {
        let now_ms = started.elapsed().as_secs_f64() * 1e3;
        let facts = EngineFacts {
            now_ms,
            token_budget: 2048,
            free_blocks: 1000,
            total_blocks: 4000,
            free_seats: 4,
            waiting: 0,
            decode_tokens: 1,
        };
        let (waited, turns) = no_core(&waits);
        let began = Instant::now();
        {
            let mut driver = engine.drive();
            driver.plan(&facts, rows, &[]);
            driver.scheduled(now_ms, &given, 0);
            driver.generated(&tokens);
        }
        let took = began.elapsed();
        let (now_waited, now_turns) = no_core(&waits);
        let own = took.saturating_sub(now_waited - waited);
        took_us.push(took.as_secs_f64() * 1e6);
        slow += u32::from(took > SLOW);
        // A thread that waits for another one leaves its core; one that never left it was held up by the machine.
        if now_turns > turns {
            delayed += u32::from(own > SLOW);
            longest = longest.max(own);
        }
    }
    took_us.sort_by(f64::total_cmp);
    let p99_us = took_us[took_us.len() * 99 / 100];
    Steps { count: took_us.len(), delayed, slow, p99_us, longest_us: longest.as_secs_f64() * 1e6 }
}

/// Time for which this thread was ready to run and had no core, and how often it got one.
fn no_core(schedstat: &File) -> (Duration, u64) {
    let mut text = [0; 128];
    let length = schedstat.read_at(&mut text, 0).unwrap();
    let text = std::str::from_utf8(&text[..length]).unwrap();
    let mut words = text.split_whitespace().skip(1).map(|word| word.parse().unwrap());
    (Duration::from_nanos(words.next().unwrap()), words.next().unwrap())
}
