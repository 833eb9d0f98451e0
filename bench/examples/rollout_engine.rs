//! An engine process with an admin listener and a little traffic, for roll-outs that are killed.
//!
//!     rollout_engine PORT TOKEN_FILE

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use meridian_core::{EngineFacts, Markers, MeridianConfig, NewRequest, RowId};
use meridian_engine::{Engine, Settings};

/// Requests that run at a time, and the tokens of each.
const RUNNING: usize = 8;
const TOKENS: u32 = 40;
const STEP: Duration = Duration::from_millis(5);

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [port, token_file] = arguments.as_slice() else { bail!("expected a port and the file of a token") };
    let toml = format!("[admin]\nlisten = \"127.0.0.1:{port}\"\ntoken_file = \"{token_file}\"\n");
    let config = MeridianConfig::from_toml(&toml)?;
    let markers = Markers::new(vec![vec![1]], vec![vec![2]], vec![])?;
    let settings =
        Settings { markers, serve: Some(meridian_admin::serve), model: "simulated".into(), ..Settings::default() };
    let engine = Engine::start(config, settings)?;
    let started = Instant::now();
    let mut running: Vec<(String, RowId, u32)> = Vec::new();
    let mut next = 0_u64;
    loop {
        let now_ms = started.elapsed().as_secs_f64() * 1e3;
        {
            let mut driver = engine.drive();
            let mut waiting = Vec::new();
            while running.len() + waiting.len() < RUNNING {
                next += 1;
                let id = next.to_string();
                let new = NewRequest { prompt: &[3], prompt_tokens: 16, arrival_ms: now_ms, ..NewRequest::default() };
                let row = driver.arrived(&id, &new, None).context("a new id")?.row;
                waiting.push((id, row, 0));
            }
            let rows = |of: &[(String, RowId, u32)]| of.iter().map(|(_, row, _)| *row).collect::<Vec<_>>();
            let facts = EngineFacts {
                now_ms,
                token_budget: 2048,
                free_blocks: 900,
                total_blocks: 1000,
                free_seats: waiting.len() as u32,
                waiting: waiting.len() as u32,
                decode_tokens: 1,
            };
            driver.plan(&facts, &rows(&running), &rows(&waiting));
            rows(&waiting).into_iter().for_each(|row| driver.admitted(row, 0));
            running.append(&mut waiting);
            let given: Vec<_> = running
                .iter()
                .map(|(_, row, _)| (*row, driver.request(*row).map_or(1, |of| of.needed_tokens(1))))
                .collect();
            driver.scheduled(now_ms, &given, 0);
        }
        std::thread::sleep(STEP);
        let mut driver = engine.drive();
        driver.set_clock(started.elapsed().as_secs_f64() * 1e3);
        let tokens: Vec<_> = running.iter().map(|(_, row, _)| (*row, 3)).collect();
        driver.generated(&tokens);
        running.iter_mut().for_each(|(_, _, tokens)| *tokens += 1);
        for (id, _, _) in running.extract_if(.., |(_, _, tokens)| *tokens >= TOKENS) {
            driver.finished(&id, "stop");
        }
    }
}
