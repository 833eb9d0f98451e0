//! What do latencies, explanations and a timeline cost in the calls of a step? 64 requests decode, with all of it off, with
//! latencies and explanations on, and with a timeline besides. Engines take turns, and the fastest of each counts.
//!
//!     cargo run --release -p meridian-engine --example observed_cost
//!
//! Prints JSON lines.

use std::time::Instant;

use meridian_core::{EngineFacts, Markers, MeridianConfig, NewRequest, RowId};
use meridian_engine::{Driver, Engine, Settings};

const REQUESTS: usize = 64;
const STEPS: usize = 2000;
const ROUNDS: usize = 30;
const THINK_START: u32 = 7;
const THINK_END: u32 = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut engines = Vec::new();
    for number in 0..3 {
        let markers = Markers::new(vec![vec![THINK_START]], vec![vec![THINK_END]], vec![])?;
        let engine = Engine::start(MeridianConfig::default(), Settings { markers, ..Settings::default() })?;
        if number > 0 {
            engine.drive().observe(16);
        }
        engines.push(engine);
    }
    let mut best = [f64::INFINITY; 3];
    let mut ending = [f64::INFINITY; 3];
    for round in 0..ROUNDS {
        for turn in 0..engines.len() {
            let number = (round + turn) % engines.len();
            let driver = &mut *engines[number].drive();
            if number == 2 {
                driver.begin_timeline();
            }
            let (steps_s, ends_s) = decode(driver, round)?;
            if number == 2 {
                driver.end_timeline();
            }
            best[number] = best[number].min(steps_s);
            ending[number] = ending[number].min(ends_s);
        }
    }
    let tokens = (REQUESTS * STEPS) as f64;
    let line = |name: &str, value: f64, unit: &str, bound: Option<f64>| {
        println!("{}", serde_json::json!({ "name": name, "value": value, "unit": unit, "bound": bound }));
    };
    let a_token = |number: usize| (best[number] - best[0]) / tokens * 1e6;
    line("a step of 64 decodes with all off", best[0] / STEPS as f64 * 1e6, "us", None);
    line("a step of 64 decodes with latencies and explanations on", best[1] / STEPS as f64 * 1e6, "us", None);
    line("a token more with latencies and explanations on", a_token(1), "us", Some(1.0));
    line("a token more with a timeline besides", a_token(2), "us", Some(1.0));
    let a_request = (ending[1] - ending[0]) / REQUESTS as f64 * 1e6;
    line("a request more, arrival and end, with them on", a_request, "us", None);
    Ok(())
}

/// Requests arrive, decode and end: the seconds of the steps, and those of arrivals and ends.
fn decode(driver: &mut Driver, round: usize) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let begin_ms = round as f64 * 1e7;
    let facts = EngineFacts {
        now_ms: begin_ms,
        token_budget: 8192,
        free_blocks: 100_000,
        total_blocks: 200_000,
        decode_tokens: 1,
        ..EngineFacts::default()
    };
    let started = Instant::now();
    let mut rows = Vec::<RowId>::new();
    for i in 0..REQUESTS {
        let request = NewRequest {
            prompt: &[1, THINK_START],
            prompt_tokens: 64,
            arrival_ms: begin_ms,
            tenant: ["", "blue", "green", "red"][i % 4],
            ..NewRequest::default()
        };
        rows.push(driver.arrived(&format!("request-{i}"), &request, None)?.row);
    }
    let mut ends_s = started.elapsed().as_secs_f64();
    driver.plan(&EngineFacts { free_seats: 64, waiting: 64, ..facts }, &[], &rows);
    for row in &rows {
        driver.admitted(*row, 0);
    }
    let prompts: Vec<_> = rows.iter().map(|row| (*row, 64)).collect();
    driver.scheduled(begin_ms, &prompts, 0);
    let given: Vec<_> = rows.iter().map(|row| (*row, 1)).collect();
    let tokens: Vec<_> = rows.iter().map(|row| (*row, 3)).collect();
    driver.generated(&tokens);
    let started = Instant::now();
    for step in 0..STEPS {
        let now_ms = begin_ms + 20.0 + step as f64 * 10.0 + f64::from(u32::from(step % 7 == 0));
        driver.plan(&EngineFacts { now_ms, ..facts }, &rows, &[]);
        driver.scheduled(now_ms, &given, 0);
        driver.set_clock(now_ms + 9.0);
        driver.generated(&tokens);
    }
    let steps_s = started.elapsed().as_secs_f64();
    let started = Instant::now();
    for i in 0..REQUESTS {
        driver.finished(&format!("request-{i}"), "stop");
    }
    ends_s += started.elapsed().as_secs_f64();
    Ok((steps_s, ends_s))
}
