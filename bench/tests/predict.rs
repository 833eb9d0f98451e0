//! Predictions from recordings: what is read of one, and how near a prediction is to what happens.

use std::path::PathBuf;

use meridian_bench::policies::{Choice, Loader, Policies};
use meridian_bench::predict::{Observed, Options, predict};
use meridian_bench::results::Slo;
use meridian_bench::sim::{EngineConfig, Outcome, Simulation, StepModel};
use meridian_bench::trace::{Generator, Prefix, TraceRequest, Workload};
use meridian_core::{MeridianConfig, SlotName};
use meridian_engine::recording::{Recorder, RecorderSettings, Recording, SlotSetup};
use meridian_fleet::stats::{Metric, Sample};

const OLD: &str = "balanced";

fn config() -> MeridianConfig {
    MeridianConfig::from_toml("[model]\nstrips_reasoning = true").expect("valid")
}

fn engine() -> EngineConfig {
    EngineConfig {
        step: StepModel { fixed_ms: 14.0, request_ms: 0.3, token_ms: 0.05, ..StepModel::default() },
        max_num_seqs: 24,
        max_num_batched_tokens: 512,
        kv_blocks: 4000,
        jitter: (0..64).map(|i| 0.9 + 0.2 * (i as f32) / 63.0).collect(),
        ..EngineConfig::default()
    }
}

fn traffic(seed: u64, seconds: f64) -> Vec<TraceRequest> {
    let workload = Workload { requests_per_s: 1.6, ..Workload::named("reasoning-chat").expect("known") };
    let requests = Generator::new(&workload, seed).expect("valid").take_while(|request| request.arrival_s < seconds);
    requests.map(|request| request.clipped(900)).collect()
}

fn simulate(policy: &str, requests: &[TraceRequest], recorder: Option<Recorder>) -> Outcome {
    let choice = Choice { dispatch: policy.parse().expect("a policy"), eviction: None, budget: None, inject: None };
    let policies = Policies::load(&mut Loader::new(config()), &choice, 1).expect("loads");
    let mut simulation = Simulation::new(&engine(), vec![policies], Slo::default(), requests.len())
        .with_max_tokens(2048)
        .keeping_times()
        .observing();
    if let Some(recorder) = recorder {
        let setup = SlotSetup { targets: config().scheduler.targets(), deadline_ms: 2.0, memory_mib: 64 };
        simulation = simulation.recorded_by(recorder, setup);
    }
    simulation.run(requests.iter().cloned(), |_| {})
}

/// The recording of an engine under these requests, and what really happened.
fn recorded(name: &str, requests: &[TraceRequest]) -> (Vec<Recording>, Outcome) {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("predict-{name}"));
    if dir.exists() {
        std::fs::remove_dir_all(&dir).expect("nobody else is in it");
    }
    let recorder = Recorder::start(RecorderSettings::new(dir.clone(), 1024)).expect("the folder can be made");
    let watch = recorder.watch();
    let outcome = simulate(OLD, requests, Some(recorder));
    assert_eq!(watch.status().dropped, 0);
    let files = std::fs::read_dir(&dir).expect("was made").map(|file| file.expect("is there").path());
    let mut recordings: Vec<Recording> = files.map(|file| Recording::open(&file).expect("a recording")).collect();
    recordings.sort_by_key(|recording| recording.header().file);
    std::fs::remove_dir_all(&dir).expect("nobody else is in it");
    (recordings, outcome)
}

fn near(found: f64, expected: f64, share: f64) -> bool {
    (found / expected - 1.0).abs() <= share
}

#[test]
fn a_recording_gives_back_its_requests_its_engine_and_its_latencies() {
    let mut requests = traffic(1, 120.0);
    let session_from = requests.len() - 4;
    for (number, request) in requests.iter_mut().enumerate() {
        request.priority = (number % 3) as i32;
        request.tenant = ["", "a", "b"][number % 3].into();
        if number % 5 == 0 {
            request.deadline_ms = 20_000.0;
        }
        // The turns of a conversation follow each other.
        if let Some(turn) = number.checked_sub(session_from) {
            request.prefix = Prefix::Session { id: 7, turn: turn as u32 };
            // A session belongs to one tenant.
            request.tenant = "a".into();
            request.prompt_tokens = 200 + 200 * turn as u32;
        }
    }
    let (recordings, outcome) = recorded("requests", &requests);
    let observed = Observed::read(&recordings).expect("readable");
    assert_eq!((observed.requests.len(), observed.missing, observed.max_tokens), (requests.len(), 0, 2048));
    // The last to end are not named by another decision.
    assert!(observed.has_ended.iter().filter(|has_ended| **has_ended).count() + 24 >= requests.len());
    let first_s = requests[0].arrival_s;
    for ((found, has_ended), truth) in observed.requests.iter().zip(&observed.has_ended).zip(&requests) {
        let later_ms = 1e3 * (found.arrival_s - (truth.arrival_s - first_s));
        let is_turn = matches!(truth.prefix, Prefix::Session { turn: 1.., .. });
        assert!(later_ms.abs() < 1.0 || is_turn && later_ms > 0.0, "{found:?} {truth:?}");
        assert_eq!((found.prompt_tokens, found.priority), (truth.prompt_tokens, truth.priority));
        assert_eq!(found.tenant.is_empty(), truth.tenant.is_empty());
        assert!(found.deadline_ms == truth.deadline_ms || (found.deadline_ms - truth.deadline_ms).abs() < 5.0);
        if *has_ended {
            assert_eq!((found.think_tokens, found.output_tokens), (truth.think_tokens, truth.output_tokens));
        }
    }
    let turns: Vec<_> = observed.requests[session_from..].iter().map(|request| request.prefix.clone()).collect();
    assert!(matches!(turns[3], Prefix::Session { turn: 3, .. }), "{turns:?}");
    let found = observed.engine(StepModel::default());
    let truth = engine();
    assert_eq!((found.kv_blocks, found.block_tokens), (truth.kv_blocks, truth.block_tokens));
    assert_eq!((found.max_num_seqs, found.max_num_batched_tokens), (truth.max_num_seqs, truth.max_num_batched_tokens));
    assert!(observed.knows_seats(), "requests waited for seats");

    let truth = Sample { counts: outcome.latency.expect("observed"), seconds: 1.0 };
    let found = Sample { counts: observed.measured.clone(), seconds: 1.0 };
    for (name, share) in [
        ("output_itl_mean", 0.02),
        ("output_itl_p99", 0.03),
        ("think_itl_mean", 0.02),
        ("queue_mean", 0.08),
        ("ttft_mean", 0.08),
        ("ttfo_mean", 0.08),
        ("ttot_mean", 0.08),
        ("e2e_mean", 0.08),
    ] {
        let metric: Metric = name.parse().expect("a metric");
        let (found, truth) = (metric.of(&found).expect("values"), metric.of(&truth).expect("values"));
        assert!(near(found, truth, share), "{name}: {found}, expected {truth}");
    }
}

fn options(new: &str) -> Options {
    Options {
        slot: SlotName::Dispatch,
        old: OLD.parse().expect("a policy"),
        new: new.parse().expect("a policy"),
        config: config(),
        max_num_seqs: None,
        replicates: 8,
        seed: 1,
        recording: "made-up".into(),
    }
}

#[test]
fn a_prediction_holds_for_traffic_that_was_not_recorded() {
    let (recordings, _) = recorded("held-out", &traffic(2, 180.0));
    let observed = Observed::read(&recordings).expect("readable");
    let mut told = Vec::new();
    let prediction = predict(&observed, &options("srpt"), &mut |done, all| told.push((done, all))).expect("predicts");
    assert_eq!((told[0], told[told.len() - 1]), ((0, 18), (18, 18)));
    assert_eq!((prediction.old.name.as_str(), prediction.new.name.as_str()), ("balanced", "srpt"));
    let basis = prediction.basis.as_ref().expect("a basis");
    let held_out = traffic(12, 180.0);
    let of = |policy: &str| {
        let outcome = simulate(policy, &held_out, None);
        Sample { counts: outcome.latency.expect("observed"), seconds: 1.0 }
    };
    let (old, new) = (of(OLD), of("srpt"));
    for name in ["output_itl_mean", "think_itl_mean", "ttft_mean", "ttfo_mean", "e2e_mean"] {
        let metric: Metric = name.parse().expect("a metric");
        let predicted = prediction.metrics[name];
        let outcome = metric.of(&new).expect("values") / metric.of(&old).expect("values");
        assert!(predicted.low <= outcome && outcome <= predicted.high, "{name}: {predicted:?}, found {outcome}");
        // The model is that of the engine, so the old policy is simulated as it was.
        assert!(near(basis.simulated[name], basis.recorded[name], 0.15), "{name}: {basis:?}");
    }
    let again = predict(&observed, &options("srpt"), &mut |_, _| ()).expect("predicts");
    assert_eq!(prediction, again, "the seed decides");
}

#[test]
fn the_same_policy_is_predicted_to_change_nothing() {
    let (recordings, _) = recorded("same", &traffic(3, 60.0));
    let observed = Observed::read(&recordings).expect("readable");
    let prediction = predict(&observed, &options(OLD), &mut |_, _| ()).expect("predicts");
    assert!(prediction.metrics.len() > 10, "{:?}", prediction.metrics.keys());
    for (name, ratio) in &prediction.metrics {
        assert_eq!((ratio.ratio, ratio.low, ratio.high), (1.0, 1.0, 1.0), "{name}");
    }
}

#[test]
fn what_cannot_be_predicted_is_refused() {
    let (recordings, _) = recorded("refused", &traffic(4, 60.0));
    let observed = Observed::read(&recordings).expect("readable");
    let refused = |options: Options| predict(&observed, &options, &mut |_, _| ()).expect_err("refused").to_string();
    assert!(
        refused(Options { slot: SlotName::Budget, ..options("srpt") }).starts_with("--slot budget: expected dispatch")
    );
    assert!(refused(options("unknown")).contains("unknown"));
    assert_eq!(refused(Options { replicates: 2, ..options("srpt") }), "--replicates 2: expected at least 8");
    let (few, _) = recorded("few", &traffic(4, 3.0));
    let error = Observed::read(&few).expect_err("too few").root_cause().to_string();
    assert!(error.contains("requests ended in it, expected at least 20"), "{error}");
    let (other, _) = recorded("other", &traffic(5, 3.0));
    let two: Vec<Recording> = few.into_iter().chain(other).collect();
    assert!(Observed::read(&two).expect_err("two processes").to_string().contains("is of another process than"));
}
