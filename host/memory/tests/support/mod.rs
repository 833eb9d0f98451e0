//! What several tests need: a second process, and a clock that goes on by itself.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use meridian_memory::fabric::{Clock, Fingerprint, NodeSettings, OfferId, Signal};

pub const MODEL: &str = "a model";
pub const LAYOUT: &str = "a layout";

pub fn settings(block_bytes: u32) -> NodeSettings {
    NodeSettings::new(Fingerprint::of(MODEL.as_bytes()), Fingerprint::of(LAYOUT.as_bytes()), block_bytes)
}

/// `kv-peer`, killed when it is dropped.
pub struct Peer {
    pub child: Child,
    pub address: SocketAddr,
    pub offer: Option<OfferId>,
}

impl Peer {
    pub fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kv-peer"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let mut words = line.split_whitespace();
        let address = words.next().expect("the peer started").parse().unwrap();
        let offer = words.next().map(|offer| OfferId(offer.parse().unwrap()));
        Self { child, address, offer }
    }

    /// As `settings` has it.
    pub fn of(block_bytes: u32, blocks: u32, more: &[&str]) -> Self {
        let (bytes, blocks) = (block_bytes.to_string(), blocks.to_string());
        let own = ["--model", MODEL, "--layout", LAYOUT, "--block-bytes", &bytes, "--blocks", &blocks];
        Self::start(&[&own[..], more].concat())
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stop it in the middle of whatever it does; it can be killed, but not continued.
    pub fn freeze(&self) {
        let frozen = Command::new("kill").args(["-STOP", &self.child.id().to_string()]).status().unwrap();
        assert!(frozen.success());
        // It goes on until the signal has reached it.
        let state = format!("/proc/{}/stat", self.child.id());
        while !std::fs::read_to_string(&state).unwrap().contains(") T ") {
            std::thread::yield_now();
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Time that passes as fast as it is waited for.
#[derive(Default)]
pub struct Hasty {
    passed_ms: AtomicU64,
    gaps: Mutex<Vec<Duration>>,
}

impl Hasty {
    pub fn waited(&self) -> Duration {
        Duration::from_millis(self.passed_ms.load(Ordering::Relaxed))
    }

    /// Waits shorter than those for a transfer: the gaps between tries.
    pub fn take_gaps(&self) -> Vec<Duration> {
        std::mem::take(&mut self.gaps.lock().unwrap())
    }
}

impl Clock for Hasty {
    fn now(&self) -> Duration {
        self.waited()
    }

    fn wait(&self, signal: &Signal, most: Duration) {
        if !signal.is_set() {
            self.passed_ms.fetch_add(most.as_millis() as u64, Ordering::Relaxed);
            if most < Duration::from_millis(100) {
                self.gaps.lock().unwrap().push(most);
            }
            std::thread::yield_now();
        }
    }
}
