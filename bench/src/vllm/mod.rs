//! The real vLLM engine under the same requests, with the same metrics: `meridian bench vllm`.
//!
//! Python does what only it can do: it drives vLLM's step loop over a list of requests and writes what it saw
//! (`python/meridian/vllm/bench/`). The requests come from here, and so do the metrics and tables. Each engine runs in a process of
//! its own.

mod comparison;
mod job;
mod process;
mod recorded;
mod scenario;

pub use comparison::{Comparison, Contestant, Progress, file_name};
pub use job::{Dtype, Job, JobEngine, JobRequest, STOCK, Setting, meridian_config};
pub use process::{Python, RunError, python_command};
pub(crate) use recorded::RecordedSteps;
pub use recorded::{Machine, RecordedRun};
pub use scenario::{Chats, EngineSize, Load, Open, SCENARIOS, Scenario};
