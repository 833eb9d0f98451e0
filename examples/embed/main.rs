//! A toy engine in Rust: eight requests that think for 20 tokens and answer with 10, four at a time. Meridian plans each
//! step; half way through, its policy is swapped while requests run.
//!
//!     cargo run --release -p meridian-engine --example embed

use std::error::Error;

use meridian_core::{EngineFacts, Markers, MeridianConfig, NewRequest, SlotName};
use meridian_engine::{Engine, Settings};
use meridian_runtime::control::{Given, Mode, Upload};

const THINK: u32 = 1;
const END_OF_THINKING: u32 = 2;
const WORD: u32 = 3;
const SEATS: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let markers = Markers::new(vec![vec![THINK]], vec![vec![END_OF_THINKING]], vec![])?;
    let engine = Engine::start(MeridianConfig::default(), Settings { markers, ..Settings::default() })?;
    let mut waiting = Vec::new();
    for number in 0..8 {
        let request = NewRequest { prompt: &[WORD, THINK], max_tokens: 30, ..NewRequest::default() };
        waiting.push(engine.drive().arrived(&format!("chat-{number}"), &request)?);
    }
    let (mut running, mut finished, mut step) = (Vec::new(), 0, 0);
    while finished < 8 {
        if step == 40 {
            // Any thread may do this; the running requests go on.
            let upload = Upload { policy: Given::Native("srpt"), options: None, source: "native:srpt" };
            let report = engine.swap(SlotName::Dispatch, &upload, Mode::Active)?;
            println!("step {step}: {} takes over from {}", report.active.name, report.previous.name);
        }
        let mut driver = engine.drive();
        let facts = EngineFacts {
            now_ms: f64::from(step) * 10.0,
            token_budget: 64,
            free_seats: u32::try_from(SEATS - running.len())?,
            waiting: u32::try_from(waiting.len())?,
            decode_tokens: 1,
            ..EngineFacts::default()
        };
        let plan = driver.plan(&facts, &running, &waiting);
        let ordered = |rows: &[_], order: &[u32]| -> Vec<_> {
            if order.is_empty() { rows.to_vec() } else { order.iter().map(|from| rows[*from as usize]).collect() }
        };
        let (caps, mut budget) = (plan.token_caps.clone(), plan.token_budget);
        (running, waiting) = (ordered(&running, &plan.running_order), ordered(&waiting, &plan.waiting_order));
        for row in waiting.drain(..(SEATS - running.len()).min(waiting.len())) {
            driver.admitted(row, 0);
            running.push(row);
        }
        let mut given = Vec::new();
        for row in &running {
            let cap = caps.iter().find(|(capped, _)| capped == row).map_or(u32::MAX, |(_, cap)| *cap);
            let needed = driver.request(*row).map_or(0, |request| request.needed_tokens(1));
            let tokens = needed.min(cap).min(budget);
            budget -= tokens;
            given.extend((tokens > 0).then_some((*row, tokens)));
        }
        driver.scheduled(facts.now_ms, &given, 0);
        // The model: a word for each, and the end of thinking in its place.
        for (row, _) in &given {
            let thought = driver.request(*row).map_or(0, |request| request.think_tokens());
            driver.generated(*row, &[if thought == 19 { END_OF_THINKING } else { WORD }]);
        }
        let is_over = |row: &_| driver.request(*row).is_some_and(|request| request.output_tokens() == 10);
        let over: Vec<_> = running.iter().copied().filter(is_over).collect();
        running.retain(|row| !over.contains(row));
        for row in over {
            let id = format!("chat-{}", driver.request(row).map_or(0, |request| request.id().0));
            driver.finished(&id, "stop");
            finished += 1;
            println!("step {step}: {id} is over");
        }
        step += 1;
    }
    engine.shutdown();
    Ok(())
}
