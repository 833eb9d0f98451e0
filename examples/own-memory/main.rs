//! A toy engine with KV memory of its own, and threads that sample: two threads feed the tokens of eight chats to one router; what
//! begins and ends there moves the chats' KV blocks between tiers. Memory is short: thinking that nothing can match any more goes
//! first, and no answer loses a block.
//!
//!     cargo run --release -p meridian-memory --example own-memory

use std::error::Error;
use std::thread;

use meridian_core::{Markers, PhaseEvent, ThinkPhase};
use meridian_memory::{BeginKv, BlockManager, KvMemory, PhaseAwareBlockManager, PhaseRouter, RequestId, RoutedRequest};

const THINK: u32 = 1;
const END_OF_THINKING: u32 = 2;
const WORD: u32 = 3;
const CHATS: u64 = 8;
const TOKENS_OF_A_BLOCK: u32 = 4;

/// What the model says in a chat: it thinks for 20 tokens and answers with 10.
fn token(number: u32) -> u32 {
    if number == 20 { END_OF_THINKING } else { WORD }
}

fn main() -> Result<(), Box<dyn Error>> {
    let router = PhaseRouter::new(Markers::new(vec![vec![THINK]], vec![vec![END_OF_THINKING]], vec![])?);
    let memory = KvMemory { capacity_bytes: 40 << 20, block_size_bytes: 1 << 20, think_fraction_limit: 1.0 };
    let blocks = PhaseAwareBlockManager::new(&memory)?;
    // Four chats are over: their blocks are cache. Four more need what they hold.
    for round in 0..2 {
        let chats: Vec<RequestId> = (round * CHATS / 2..(round + 1) * CHATS / 2).map(RequestId).collect();
        for chat in &chats {
            router.register(*chat, &RoutedRequest { prompt: &[WORD, THINK], ..RoutedRequest::default() })?;
            blocks.begin(*chat, &BeginKv { strips_reasoning: true, ..BeginKv::default() })?;
            blocks.allocate(*chat, 1)?;
            blocks.set_phase(*chat, ThinkPhase::Think, 0)?;
        }
        for number in 0..31 {
            // A step: each thread samples for its half of the batch, and the phases are there when both are done.
            let events: Vec<(RequestId, PhaseEvent)> = thread::scope(|threads| {
                let (router, halves) = (&router, chats.chunks(chats.len() / 2));
                let samplers: Vec<_> = halves
                    .map(|half| {
                        threads.spawn(move || {
                            let tokens: Vec<_> = half.iter().map(|chat| (*chat, token(number))).collect();
                            let mut events = Vec::new();
                            router.process_batch(&tokens, &mut events);
                            events
                        })
                    })
                    .collect();
                samplers.into_iter().flat_map(|sampler| sampler.join().unwrap_or_default()).collect()
            });
            for (chat, event) in events {
                println!("round {round}, token {number}: chat {}: {event:?}", chat.0);
                let thought = router.progress(chat).map_or(0, |progress| progress.think_tokens);
                blocks.set_phase(chat, ThinkPhase::Output, thought)?;
            }
            if number % TOKENS_OF_A_BLOCK == 0 {
                for chat in &chats {
                    blocks.allocate(*chat, 1)?;
                }
            }
        }
        for chat in chats {
            blocks.finish(chat, f64::from(u32::try_from(round)?))?;
            router.remove(chat);
        }
    }
    let stats = blocks.stats();
    println!(
        "evicted: {} of thinking, {} of answers",
        stats.dead_think_blocks_evicted(),
        stats.output_critical_evictions()
    );
    blocks.audit()?;
    assert_eq!((stats.dead_think_blocks_evicted() > 0, stats.output_critical_evictions()), (true, 0));
    Ok(())
}
