//! Conversations of traces that name them, and what a turn's prompt has of the turns before.

use std::collections::HashMap;

use super::Prefix;

/// What is known of each conversation, by its name in the trace.
#[derive(Default)]
pub(super) struct Conversations {
    known: HashMap<Box<str>, Turn>,
    next_id: u64,
}

/// The last turn of a conversation.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    id: u64,
    turn: u32,
    /// Tokens of its prompt and of all that it generated.
    pub(super) history_tokens: u64,
    pub(super) arrival_s: f64,
}

impl Turn {
    pub(super) fn prefix(self) -> Prefix {
        Prefix::Session { id: self.id, turn: self.turn }
    }
}

impl Conversations {
    /// The turn before, if there was one.
    pub(super) fn last(&self, name: &str) -> Option<Turn> {
        self.known.get(name).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// The next turn of a conversation, whose prompt has all that was said before. A prompt too short for that begins
    /// another one.
    pub(super) fn next(&mut self, name: &str, prompt_tokens: u32, generated: u32, arrival_s: f64) -> Turn {
        let before = self.last(name).filter(|before| u64::from(prompt_tokens) >= before.history_tokens);
        let (id, turn) = match before {
            Some(before) => (before.id, before.turn.saturating_add(1)),
            None => {
                self.next_id += 1;
                (self.next_id - 1, 0)
            }
        };
        let turn = Turn { id, turn, history_tokens: u64::from(prompt_tokens) + u64::from(generated), arrival_s };
        self.known.insert(name.into(), turn);
        turn
    }
}
