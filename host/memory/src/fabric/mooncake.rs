//! Mooncake: its transfer engine reads the memory of peers. Its wheel has an interface for Python only, so it runs in a
//! process of its own (`python -m meridian.mooncake_process`), which maps the same memory. Bytes never pass between the two.
//!
//! ```
//! use meridian_memory::fabric::KvFabricError;
//! use meridian_memory::fabric::mooncake::Mooncake;
//!
//! let missing = Mooncake::start(&["/nowhere/python".to_owned()]).err();
//! assert!(matches!(missing, Some(KvFabricError::Unavailable { .. })));
//! ```

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::fabric::transfer::locked;
use crate::fabric::{DataPath, FabricKind, KvFabricError, Part, PathPeer, Region, RegionError, Stop};

/// Between two looks whether a read is to stop.
const LOOK: Duration = Duration::from_millis(1);
const MAX_MEMORIES: usize = 1024;

/// A process with Mooncake's transfer engine.
pub struct Mooncake {
    command: Vec<String>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// `None` after it has ended; the next request starts another.
    helper: Option<Helper>,
    /// Registered memory.
    regions: Vec<Arc<Region>>,
}

struct Helper {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// Mooncake's name of the process, for peers.
    session: String,
    memories: Vec<Memory>,
}

/// A piece of memory that two processes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Memory {
    /// In Meridian's process.
    named: u64,
    /// In Mooncake's process.
    mapped: u64,
    bytes: u64,
}

impl Memory {
    /// The address in Mooncake's process, of a part that lies in this memory.
    fn address(&self, named: u64, bytes: u32) -> Option<u64> {
        let start = named.checked_sub(self.named)?;
        (start.checked_add(bytes.into())? <= self.bytes).then(|| self.mapped.checked_add(start))?
    }
}

fn address(memories: &[Memory], named: u64, bytes: u32) -> Result<u64, KvFabricError> {
    let found = memories.iter().find_map(|memory| memory.address(named, bytes));
    found.ok_or_else(|| error("a block outside the registered memory"))
}

fn error(reason: impl Into<String>) -> KvFabricError {
    KvFabricError::Path { fabric: FabricKind::Mooncake, reason: reason.into() }
}

impl Mooncake {
    /// Start the process with this command.
    ///
    /// # Errors
    /// [`KvFabricError::Unavailable`] when it does not start, such as without the Python package.
    pub fn start(command: &[String]) -> Result<Arc<Self>, KvFabricError> {
        let helper = Helper::start(command, &[]).map_err(|error| {
            let reason = error.to_string();
            KvFabricError::Unavailable { fabric: FabricKind::Mooncake, reason }
        })?;
        let state = Mutex::new(State { helper: Some(helper), regions: Vec::new() });
        Ok(Arc::new(Self { command: command.to_vec(), state }))
    }

    /// Ask the process, unless this is to stop; after any error it is ended, and the next call starts another.
    fn with<T>(
        &self,
        stop: &Stop,
        ask: impl FnOnce(&mut Helper, &mut Vec<Arc<Region>>) -> Result<T, KvFabricError>,
    ) -> Result<T, KvFabricError> {
        let state = &mut *locked(&self.state);
        // Asked while another call held the lock: a process that starts now would start for nothing.
        if stop.is_asked() {
            return Err(KvFabricError::Cancelled);
        }
        let mut helper = match state.helper.take() {
            Some(helper) => helper,
            None => Helper::start(&self.command, &state.regions)?,
        };
        let answer = ask(&mut helper, &mut state.regions)?;
        state.helper = Some(helper);
        Ok(answer)
    }
}

impl Helper {
    fn start(command: &[String], regions: &[Arc<Region>]) -> Result<Self, KvFabricError> {
        let (program, arguments) = command.split_first().ok_or_else(|| error("no command"))?;
        let started = Command::new(program).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = started.map_err(|why| error(format!("{program}: {why}")))?;
        let (Some(requests), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(error("no pipes"));
        };
        let answers = BufReader::new(answers);
        let mut helper = Self { child, requests, answers, session: String::new(), memories: Vec::new() };
        helper.session = answer(&mut helper.answers)?;
        for region in regions {
            helper.register(region)?;
        }
        Ok(helper)
    }

    fn ask(&mut self, request: &str) -> Result<(), KvFabricError> {
        let sent = self.requests.write_all(request.as_bytes()).and_then(|()| self.requests.flush());
        sent.map_err(|_| error("the process has ended"))
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<(), KvFabricError> {
        let path = region.shared_path().ok_or_else(|| error("memory that no other process can map"))?;
        self.ask(&format!("register {} {path}\n", region.bytes()))?;
        let mapped = answer(&mut self.answers)?;
        let mapped = mapped.parse().map_err(|_| error(format!("an address was expected, not {mapped:?}")))?;
        self.memories.push(Memory { named: region.address() as u64, mapped, bytes: region.bytes() as u64 });
        Ok(())
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // Nothing of it may write to the memory after this.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The next answer: the rest of a line that begins with `ok`. Mooncake may log to the same stream.
fn answer(answers: &mut BufReader<ChildStdout>) -> Result<String, KvFabricError> {
    let mut line = String::new();
    loop {
        line.clear();
        match answers.read_line(&mut line) {
            Ok(0) | Err(_) => return Err(error("the process has ended")),
            Ok(_) => {}
        }
        let text = line.trim_end();
        if let Some(text) = text.strip_prefix("meridian ok") {
            return Ok(text.trim_start().to_owned());
        }
        if let Some(text) = text.strip_prefix("meridian error ") {
            return Err(error(text));
        }
    }
}

/// The description of a peer's process: its name, then one memory a line.
fn parse(rights: &str) -> Option<(&str, Vec<Memory>)> {
    let mut lines = rights.lines();
    let session = lines.next()?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | ':' | '-' | '[' | ']');
    if session.is_empty() || session.len() > 128 || !session.chars().all(is_plain) {
        return None;
    }
    let mut memories = Vec::new();
    for line in lines {
        let mut numbers = line.split(' ').map(str::parse);
        let (Some(Ok(named)), Some(Ok(mapped)), Some(Ok(bytes)), None) =
            (numbers.next(), numbers.next(), numbers.next(), numbers.next())
        else {
            return None;
        };
        memories.push(Memory { named, mapped, bytes });
        if memories.len() > MAX_MEMORIES {
            return None;
        }
    }
    Some((session, memories))
}

impl DataPath for Mooncake {
    fn kind(&self) -> FabricKind {
        FabricKind::Mooncake
    }

    fn allocate(&self, blocks: u32, block_bytes: u32) -> Result<Arc<Region>, RegionError> {
        Region::allocate_shared(blocks, block_bytes)
    }

    fn register(&self, region: &Arc<Region>) -> Result<(), KvFabricError> {
        self.with(&Stop::default(), |helper, regions| {
            if regions.len() >= MAX_MEMORIES {
                return Err(error("too many registered memories"));
            }
            helper.register(region)?;
            regions.push(Arc::clone(region));
            Ok(())
        })
    }

    fn rights(&self) -> Result<Vec<u8>, KvFabricError> {
        self.with(&Stop::default(), |helper, _| {
            let mut rights = format!("{}\n", helper.session);
            for Memory { named, mapped, bytes } in &helper.memories {
                rights += &format!("{named} {mapped} {bytes}\n");
            }
            Ok(rights.into_bytes())
        })
    }

    fn connect(&self, rights: &[u8]) -> Result<PathPeer, KvFabricError> {
        let text = std::str::from_utf8(rights).ok().filter(|text| parse(text).is_some());
        text.map(|text| PathPeer(text.to_owned())).ok_or_else(|| error("a peer described its memory wrongly"))
    }

    fn read(&self, peer: &PathPeer, parts: &[Part], stop: &Stop, moved: &dyn Fn(u64)) -> Result<(), KvFabricError> {
        let (session, theirs) = parse(&peer.0).ok_or_else(|| error("a peer described its memory wrongly"))?;
        self.with(stop, |helper, _| {
            let mut request = format!("read {} {session}\n", parts.len());
            for Part { remote, local, bytes } in parts {
                let local = address(&helper.memories, *local, *bytes)?;
                request += &format!("{local} {} {bytes}\n", address(&theirs, *remote, *bytes)?);
            }
            helper.ask(&request)?;
            let Helper { child, answers, .. } = helper;
            std::thread::scope(|threads| {
                let waiting = threads.spawn(|| answer(answers));
                while !waiting.is_finished() {
                    if stop.is_asked() {
                        // A read cannot be cancelled; the process can.
                        let _ = child.kill();
                        let _ = waiting.join();
                        return Err(KvFabricError::Cancelled);
                    }
                    std::thread::sleep(LOOK);
                }
                waiting.join().unwrap_or_else(|_| Err(error("the answer could not be read")))
            })
            .map(drop)
        })?;
        moved(parts.iter().map(|part| u64::from(part.bytes)).sum());
        Ok(())
    }

    fn disconnect(&self, _peer: &PathPeer) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_descriptions_are_refused() {
        let (session, memories) = parse("127.0.0.1:12345\n4096 8192 100\n").unwrap();
        assert_eq!(session, "127.0.0.1:12345");
        assert_eq!(memories, [Memory { named: 4096, mapped: 8192, bytes: 100 }]);
        for hostile in ["", "\n", "a b\n", "a\n1 2\n", "a\n1 2 3 4\n", "a\n-1 2 3\n", "a\n1 2 x\n", "a;b\n1 2 3\n"] {
            assert_eq!(parse(hostile), None, "{hostile:?}");
        }
        assert_eq!(parse(&format!("a\n{}", "1 2 3\n".repeat(MAX_MEMORIES + 1))), None);
    }

    #[test]
    fn addresses_stay_in_their_memory() {
        let memories = [Memory { named: 4096, mapped: 8192, bytes: 100 }];
        assert_eq!(address(&memories, 4096, 100), Ok(8192));
        assert_eq!(address(&memories, 4106, 90), Ok(8202));
        for (named, bytes) in [(4095, 1), (4096, 101), (4196, 1), (u64::MAX, 4), (0, 0)] {
            assert!(address(&memories, named, bytes).is_err(), "{named} {bytes}");
        }
        assert!(address(&[Memory { named: 0, mapped: u64::MAX, bytes: u64::MAX }], 8, 8).is_err());
    }
}
