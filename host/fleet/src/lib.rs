//! Many engines: reaching them, staged roll-outs, experiments, and handoffs from one engine to another.
//!
//! ```no_run
//! use meridian_fleet::{AT_A_TIME, Fleet, Member, each};
//!
//! let fleet = Fleet::from_file("fleet.toml".as_ref())?;
//! for (engine, status) in fleet.engines.iter().zip(each(&fleet.engines, AT_A_TIME, Member::status)) {
//!     match status {
//!         Ok(status) => println!("{}: {} requests wait", engine.name(), status.waiting),
//!         Err(error) => println!("{error}"),
//!     }
//! }
//! # Ok::<(), meridian_fleet::FleetError>(())
//! ```

mod each;
mod endpoint;
mod engine;
mod error;
pub mod experiment;
mod find;
mod handoff;
mod http;
mod member;
mod prediction;
pub mod rollout;
pub mod stats;
mod tls;

pub use each::{AT_A_TIME, each};
pub use endpoint::Endpoint;
pub use engine::{BudgetChange, EngineClient, Patience};
pub use error::FleetError;
pub use find::{Fleet, processes};
pub use handoff::{AnsweringEngine, ClientLimits, Handoff, HandoffError, HandoffSettings, HandoffStatus};
pub use member::{Member, MemberError, NamedPolicy, PolicyOrigin};
pub use prediction::{Basis, PREDICTION_FORMAT, PolicyName, PredictedRatio, Prediction, PredictionError};
