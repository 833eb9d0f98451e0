//! A toy engine in Rust: eight requests that think for 20 tokens and answer with 10, four at a time. Meridian plans each
//! step; half way through, its policy is swapped while requests run.
//!
//!     cargo run --release -p meridian-engine --example embed

use std::collections::HashMap;
use std::error::Error;

use meridian_core::{EngineFacts, Markers, MeridianConfig, NewRequest, Queues, SlotName, TableStep};
use meridian_engine::control::{Given, Mode, Upload};
use meridian_engine::{Engine, Settings};

const THINK: u32 = 1;
const END_OF_THINKING: u32 = 2;
const WORD: u32 = 3;
const SEATS: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let markers = Markers::new(vec![vec![THINK]], vec![vec![END_OF_THINKING]], vec![])?;
    let engine = Engine::start(MeridianConfig::default(), Settings { markers, ..Settings::default() })?;
    let (mut queues, mut ids, mut number) = (Queues::default(), HashMap::new(), 0);
    for chat in 0..8 {
        let request = NewRequest { prompt: &[WORD, THINK], max_tokens: 30, ..NewRequest::default() };
        let id = format!("chat-{chat}");
        let row = engine.drive().arrived(&id, &request, None)?.row;
        queues.waiting.push_back(row);
        ids.insert(row, id);
    }
    while !queues.is_empty() {
        if number == 40 {
            // Any thread may do this; the running requests go on.
            let upload = Upload { policy: Given::Native("srpt"), options: None, source: "native:srpt" };
            let report = engine.swap(SlotName::Dispatch, &upload, Mode::Active)?;
            println!("step {number}: {} takes over from {}", report.active.name, report.previous.name);
        }
        let mut driver = engine.drive();
        let facts = EngineFacts {
            now_ms: f64::from(number) * 10.0,
            token_budget: 64,
            free_seats: u32::try_from(SEATS - queues.running.len())?,
            waiting: u32::try_from(queues.waiting.len())?,
            decode_tokens: 1,
            ..EngineFacts::default()
        };
        let plan = driver.plan(&facts, &queues.running, queues.waiting.make_contiguous()).clone();
        // The engine carries the plan out, and reports what it did.
        let mut step = TableStep::new(&driver.scheduler().mirror().table, 1);
        queues.carry_out(&plan, SEATS, &mut step);
        let TableStep { admitted, given, .. } = step;
        admitted.into_iter().for_each(|row| driver.admitted(row, 0));
        driver.scheduled(facts.now_ms, &given, 0);
        // The model: a word for each, and the end of thinking in its place.
        for (row, _) in given {
            let thought = driver.request(row).map_or(0, |request| request.think_tokens());
            driver.generated(&[(row, if thought == 19 { END_OF_THINKING } else { WORD })]);
        }
        let mut is_over = |row: &_| driver.request(*row).is_some_and(|request| request.output_tokens() == 10);
        let over: Vec<_> = queues.running.extract_if(.., |row| is_over(row)).collect();
        for row in over {
            let Some(id) = ids.remove(&row) else { continue };
            println!("step {number}: {id} is over");
            driver.finished(&id, "stop");
        }
        number += 1;
    }
    engine.shutdown();
    Ok(())
}
