//! One engine: its policies, slots and services, and the calls of its life. The vLLM plugin, the simulator and Rust
//! programs drive it the same way.
//!
//! ```
//! use meridian_core::{EngineFacts, Markers, MeridianConfig, NewRequest, SlotName};
//! use meridian_engine::{Engine, Settings};
//! use meridian_engine::control::{Given, Mode, Upload};
//!
//! // Token 7 starts thinking, 8 ends it; the template opens thinking in the prompt.
//! let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
//! let engine = Engine::start(MeridianConfig::default(), Settings { markers, ..Settings::default() })?;
//!
//! // The thread that schedules drives it, step by step.
//! let mut driver = engine.drive();
//! let row = driver.arrived("chat-1", &NewRequest { prompt: &[1, 2, 7], ..NewRequest::default() }, None)?.row;
//! let facts = EngineFacts { token_budget: 2048, free_seats: 8, decode_tokens: 1, ..EngineFacts::default() };
//! assert_eq!(driver.plan(&facts, &[], &[row]).token_budget, 2048);
//! driver.admitted(row, 0);
//! driver.scheduled(facts.now_ms, &[(row, 3)], 0);
//! driver.generated(&[(row, 40), (row, 8), (row, 41)]);
//! assert_eq!(driver.request(row).map(|request| (request.think_tokens(), request.output_tokens())), Some((2, 1)));
//! drop(driver);
//!
//! // Any other thread changes its policies meanwhile.
//! let upload = Upload { policy: Given::Native("fcfs"), options: None, source: "native:fcfs" };
//! assert_eq!(engine.swap(SlotName::Dispatch, &upload, Mode::Active)?.active.name, "fcfs");
//! engine.drive().finished("chat-1", "stop");
//! engine.shutdown();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod awaited;
pub mod budgets;
pub mod config_file;
mod config_watch;
pub mod control;
mod controller;
mod driver;
mod engine;
mod error;
pub mod explain;
mod insight;
mod kv;
mod live;
mod loader;
pub mod otlp;
pub mod private;
pub mod recording;
pub mod sampler;
mod services;
mod slots;
mod thinking;
pub mod timeline;
pub mod watch;

pub use awaited::FetchPace;
pub use controller::{ControlledSlot, Controller, EngineStatus, Loader, RecordingStatusOf, Refusal};
pub use driver::{Arrived, Driver};
pub use engine::{DataParallel, Engine, Settings, user_cache_dir};
pub use error::EngineError;
pub use kv::Pool;
pub use loader::{Components, Origin, PolicyError, Terms, set_compile_command};
pub use meridian_registry::Limits as RegistryLimits;
pub use meridian_wasm::{CompileCommand, compile_child};
pub use services::{Listeners, StartListeners};
pub use slots::strike_limits;
pub use thinking::ThinkTokens;
