//! What an engine tells of single requests and steps, through the interfaces that its listeners use.

use meridian_core::{EngineFacts, Markers, MeridianConfig, NewRequest, Part, Queues, RowId, SlotName, TableStep};
use meridian_engine::control::{Given, Mode, Upload};
use meridian_engine::timeline::chrome_json;
use meridian_engine::{Driver, Engine, Settings};
use serde_json::Value;

const THINK_END: u32 = 8;

fn started() -> Engine {
    let markers = Markers::new(vec![vec![7]], vec![vec![THINK_END]], vec![]).unwrap();
    let settings = Settings { markers, model: "tiny".into(), ..Settings::default() };
    let engine = Engine::start(MeridianConfig::default(), settings).unwrap();
    engine.drive().observe(4);
    engine
}

fn arrive(driver: &mut Driver, id: &str, arrival_ms: f64) -> RowId {
    let new = NewRequest { prompt: &[1, 7], prompt_tokens: 32, arrival_ms, ..NewRequest::default() };
    driver.arrived(id, &new, None).unwrap().row
}

/// One step that gives each request its tokens, and admits those that wait, as far as `seats` go.
fn step(driver: &mut Driver, now_ms: f64, queues: &mut Queues, seats: usize) {
    let free = seats.saturating_sub(queues.running.len());
    let Queues { running, waiting, .. } = queues;
    let facts = EngineFacts {
        now_ms,
        token_budget: 256,
        free_blocks: 900,
        total_blocks: 1000,
        free_seats: free as u32,
        waiting: waiting.len() as u32,
        decode_tokens: 1,
    };
    let window = if free > 0 { &*waiting.make_contiguous() } else { &[] };
    let plan = driver.plan(&facts, running, window).clone();
    let mut step = TableStep::new(&driver.scheduler().mirror().table, 1);
    queues.carry_out(&plan, seats, &mut step);
    let TableStep { admitted, given, .. } = step;
    admitted.into_iter().for_each(|row| driver.admitted(row, 0));
    driver.scheduled(now_ms, &given, 0);
    driver.set_clock(now_ms + 9.0);
    let tokens: Vec<(RowId, u32)> = given.iter().map(|(row, _)| (*row, 3)).collect();
    driver.generated(&tokens);
}

#[test]
fn latencies_of_all_tenants_are_reported() {
    let engine = started();
    let mut queues = Queues::default();
    let before = engine.control().latency().unwrap();
    {
        let driver = &mut *engine.drive();
        queues.waiting.push_back(arrive(driver, "chat-1", 0.0));
        step(driver, 10.0, &mut queues, 1);
        step(driver, 30.0, &mut queues, 1);
        driver.finished("chat-1", "stop");
    }
    let report = engine.control().latency().unwrap();
    assert_eq!(report.run, before.run);
    let counts = report.counts.since(&before.counts).unwrap();
    assert_eq!((counts.finished, counts.think_tokens, counts.ttft.mean_ms()), (1, 2, Some(19.0)));
    assert_eq!(counts.think_itl.mean_ms(), Some(20.0));
    assert_ne!(started().control().latency().unwrap().run, report.run, "another engine");
}

#[test]
fn a_request_is_explained_while_it_lives_and_after_its_end() {
    let engine = started();
    let mut queues = Queues::default();
    {
        let driver = &mut *engine.drive();
        queues.waiting.push_back(arrive(driver, "chat-1", 0.0));
        step(driver, 10.0, &mut queues, 1);
        queues.waiting.push_back(arrive(driver, "chat-2", 15.0));
        step(driver, 20.0, &mut queues, 1);
        step(driver, 30.0, &mut queues, 1);
    }
    let insight = engine.control().insight().unwrap();
    let waits = insight.explain("chat-2").unwrap();
    assert_eq!((waits.state.as_str(), waits.waits_for), ("waiting", Some(Part::Seat)));
    assert_eq!([Part::Arrival, Part::Seat].map(|part| waits.part_ms(part)), [5.0, 19.0]);
    assert!(insight.explain("chat").unwrap_err().contains("2 requests have this in their id"));
    assert!(insight.explain("chat-3").unwrap_err().starts_with("chat-3: no live request has this id"));
    {
        let driver = &mut *engine.drive();
        let row = queues.running.remove(0);
        assert_eq!(driver.finished("chat-1", "stop"), Some(row));
        step(driver, 40.0, &mut queues, 1);
        driver.finished("chat-2", "length");
    }
    let ended = insight.explain("chat-1").unwrap();
    assert_eq!((ended.state.as_str(), ended.ended, ended.waits_for), ("stop", true, None));
    assert_eq!([Part::Arrival, Part::Prefill, Part::Think].map(|part| ended.part_ms(part)), [10.0, 9.0, 20.0]);
    let second = insight.explain("chat-2").unwrap();
    assert_eq!(second.before.iter().map(|admission| admission.number).collect::<Vec<_>>(), [] as [u32; 0]);
    assert_eq!(second.parts.iter().map(|part| part.ms).sum::<f64>(), second.latency_ms);
    let status = engine.control().status();
    assert_eq!(status.latency[0].e2e.count(), 2);
    assert_eq!((status.blocks, status.steps.iter().map(|of| of.count()).sum::<u64>()), (Some([900, 1000]), 3));
}

#[test]
fn all_requests_that_a_text_may_mean_are_named_those_of_one_client_together() {
    let engine = started();
    for id in ["0_b", "10_a", "2_a", "1_b", "0_a", "1_b"] {
        let driver = &mut *engine.drive();
        arrive(driver, id, 30.0);
        driver.finished(id, "abort");
    }
    let insight = engine.control().insight().unwrap();
    let several = insight.explain("_").unwrap_err();
    assert_eq!(several, "_: 5 requests have this in their id: 0_a, 2_a, 10_a, 0_b, 1_b");
    assert_eq!(insight.explain("0_a").unwrap().request, "0_a", "not 10_a");
    assert_eq!(insight.explain("1_b").unwrap().request, "1_b", "the latest of an id");
    for number in 0..100 {
        arrive(&mut engine.drive(), &format!("{number}_c"), 40.0);
    }
    let many = insight.explain("_c").unwrap_err();
    assert!(
        many.starts_with("_c: 100 requests have this in their id: 0_c, 1_c, ") && many.ends_with(", 63_c ..."),
        "{many}"
    );
}

#[test]
fn an_engine_that_nobody_asks_keeps_nothing_of_ended_requests() {
    let engine = Engine::start(MeridianConfig::default(), Settings::default()).unwrap();
    let driver = &mut *engine.drive();
    arrive(driver, "chat-1", 0.0);
    driver.finished("chat-1", "stop");
    assert!(driver.explain("chat-1").is_err());
    assert!(driver.end_timeline().is_none());
}

#[test]
fn a_timeline_has_steps_requests_decisions_and_the_swap() {
    let engine = started();
    let mut queues = Queues::default();
    {
        let driver = &mut *engine.drive();
        queues.waiting.push_back(arrive(driver, "before", 0.0));
        step(driver, 10.0, &mut queues, 2);
    }
    let insight = engine.control().insight().unwrap();
    insight.begin_timeline();
    {
        let driver = &mut *engine.drive();
        queues.waiting.push_back(arrive(driver, "during", 15.0));
        step(driver, 20.0, &mut queues, 2);
        step(driver, 30.0, &mut queues, 2);
    }
    let upload = Upload { policy: Given::Native("fcfs"), options: None, source: "native:fcfs" };
    engine.swap(SlotName::Dispatch, &upload, Mode::Active).unwrap();
    {
        let driver = &mut *engine.drive();
        step(driver, 40.0, &mut queues, 2);
        let over = driver.finished("during", "stop");
        queues.running.retain(|row| Some(*row) != over);
        step(driver, 50.0, &mut queues, 2);
    }
    let timeline = insight.end_timeline().unwrap();
    assert!(insight.end_timeline().is_none());
    let trace: Value = serde_json::from_str(&chrome_json(&timeline)).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |category: &str| events.iter().filter(|event| event["cat"] == category).collect::<Vec<_>>();
    assert_eq!(of("step").len(), 4);
    assert_eq!(of("step")[0]["args"]["prefills"]["during"], 32);
    assert_eq!((of("decision").len(), of("swap").len(), of("end").len()), (4, 1, 1));
    assert_eq!(of("swap")[0]["name"], "swap to fcfs");
    let names: Vec<_> = events
        .iter()
        .filter(|event| event["name"] == "thread_name")
        .map(|event| event["args"]["name"].clone())
        .collect();
    assert!(names.contains(&"before".into()) && names.contains(&"during".into()), "{names:?}");
    let spans: Vec<(&str, f64, f64)> = of("run")
        .into_iter()
        .chain(of("wait"))
        .filter(|event| event["tid"] == 2)
        .map(|event| (event["name"].as_str().unwrap(), event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap()))
        .collect();
    // From the engine's latest time before it, 19 ms.
    assert_eq!(spans, [("prefill", 1000.0, 9000.0), ("thinking", 10000.0, 20000.0), ("arriving", 0.0, 1000.0)]);
}
