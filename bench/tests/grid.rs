//! Grids: the same bytes whether they ran through or were interrupted, and rows that say why they are left out.

use meridian_bench::grid::{Axes, Grid, Kept, OPPONENTS, STOCK};
use meridian_bench::load::{Course, Stage};
use meridian_bench::metrics::HOLDS;
use meridian_bench::replay::{Input, Options, Rate, replay};
use meridian_bench::results::Slo;
use meridian_bench::sim::EngineConfig;
use meridian_bench::steady::{RESIDENCES, capacity, steady};
use meridian_bench::trace::Workload;
use meridian_core::MeridianConfig;
use step::STEP;

use crate::step;

const WORKLOAD: &str = "
    preset = 'plain-chat'
    most_generated_tokens = 40
    [prompt]
    median = 200.0
    sigma = 0.5
    tail_share = 0.0
    [[modes]]
    weight = 1.0
    think_share = 0.5
    concentration = 10.0
    generated_median = 20.0
    generated_sigma = 0.5
";

fn engine() -> EngineConfig {
    EngineConfig { step: STEP, max_num_seqs: 32, max_num_batched_tokens: 512, kv_blocks: 2000, ..Default::default() }
}

fn input() -> Input {
    let workload = Box::new(Workload::from_toml(WORKLOAD).unwrap());
    Input::Generated { name: "chat".into(), workload, requests: 2000 }
}

fn options() -> Options {
    let slo = Slo { ttfo_ms: 500.0, ..Slo::default() };
    let options = Options::stock(slo, vec![1], MeridianConfig::default(), String::new());
    Options { engine: engine(), policies: vec!["balanced".parse().unwrap()], ..options }
}

#[test]
fn a_grid_that_was_interrupted_gives_the_same_bytes() {
    let engines = vec![("one".to_owned(), engine()), ("two".to_owned(), EngineConfig { max_num_seqs: 8, ..engine() })];
    let axes = Axes { engines, traffic: vec![("chat".into(), input())], loads: vec![0.9], bursts: vec![0.5] };
    let folder = std::env::temp_dir().join(format!("meridian-grid-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("grid.rows");
    let run = |kept: &Kept| Grid::run(&axes, &options(), kept, &|_, _, _| ()).unwrap();
    let whole = run(&Kept::read(&path).unwrap());
    // Killed while it wrote its second row.
    let lines = std::fs::read_to_string(&path).unwrap();
    assert_eq!(lines.lines().count(), 2);
    std::fs::write(&path, &lines[..lines.len() - 40]).unwrap();
    let kept = Kept::read(&path).unwrap();
    assert_eq!(kept.len(), 1);
    let json = |grid: &Grid| serde_json::to_string(grid).unwrap();
    assert_eq!(json(&run(&kept)), json(&whole));
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!((whole.rows.len(), whole.cells.len()), (2, 4));
    for cell in &whole.cells {
        for name in OPPONENTS.into_iter().chain(["balanced"]) {
            assert!(cell.metric(name, "goodput_rps").is_some_and(|rate| rate > 0.0), "{}: {name}", cell.name());
        }
        assert_eq!(cell.part.is_none(), !cell.contenders[STOCK].levels.is_empty(), "a day is shown over time");
    }
    for row in &whole.rows {
        let capacity = row.capacity.unwrap();
        assert_eq!(row.left_out().is_none(), capacity.converged && capacity.busy >= 0.5, "{row:?}");
    }
}

#[test]
fn a_steady_run_measures_twenty_lives_at_the_rate_it_is_given() {
    let found = capacity(&options(), &input(), HOLDS).unwrap().unwrap();
    let at = steady(&options(), &input(), found.rate / 2.0, RESIDENCES, 0.0).unwrap();
    assert!(at.converged);
    let of = |key: &str| at.run.metrics[key];
    let measured_s = of("requests") / (found.rate / 2.0);
    assert!(measured_s >= 0.9 * RESIDENCES * at.residence_s, "{measured_s} s, {} s", at.residence_s);
    // What arrives is served, within what chance does to so many.
    let goodput = of("goodput_rps") / of("slo_attainment");
    assert!((goodput / (found.rate / 2.0) - 1.0).abs() < 0.1, "{goodput}");
    // Twice as much is not served.
    let above = steady(&options(), &input(), 2.0 * found.rate, RESIDENCES, 0.9).unwrap();
    assert!(above.run.metrics["slo_attainment"] < 0.9);
}

#[test]
fn a_bounded_queue_turns_requests_away_and_they_count_as_missed() {
    let rate = 2.0 * capacity(&options(), &input(), HOLDS).unwrap().unwrap().rate;
    let day = Course::day(vec![Stage::flat(0.3, 20.0), Stage::flat(1.5, 20.0), Stage::flat(0.3, 40.0)]);
    let run = |most: u32| {
        let engine = EngineConfig { max_num_queued_reqs: most, ..engine() };
        let options = Options {
            engine,
            policies: vec![],
            rates: vec![Rate::PerSecond(rate)],
            course: Some(day.clone()),
            ..options()
        };
        replay(&options, &input(), &mut |_, _, _| {}).unwrap().runs.remove(0)
    };
    let (unbounded, bounded) = (run(0), run(40));
    let of = |run: &meridian_bench::results::Run, key: &str| run.metrics.get(key).copied().unwrap_or(0.0);
    assert_eq!(of(&unbounded, "turned_away"), 0.0);
    assert!(of(&bounded, "turned_away") > 50.0);
    assert_eq!(of(&bounded, "requests"), of(&unbounded, "requests"), "missed ones are requests");
    assert!(of(&bounded, "ttfo_p99_ms") < of(&unbounded, "ttfo_p99_ms"));
    assert!(of(&bounded, "slo_attainment") < 1.0 && of(&bounded, "burst_attainment") < of(&bounded, "slo_attainment"));
    assert!(of(&bounded, "recovery_s") <= of(&unbounded, "recovery_s"));
    let arrived: u64 = bounded.levels.iter().map(|level| level.arrived).sum();
    assert_eq!(arrived as f64, of(&bounded, "requests"));
}
