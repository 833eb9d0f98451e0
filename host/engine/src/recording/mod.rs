//! The questions to the slots and the answers of their policies, in files that polars, DuckDB and pyarrow read, and
//! that [`replay`] decides again.
//!
//! A [`Recorder`] has one thread, which writes for every slot. The deciding thread copies a decision into reused memory
//! and hands it over; if the writer is late, the decision is dropped and counted. Files are Arrow IPC files, one per
//! slot and policy, and complete after every batch. `docs/src/traces.md` describes their columns.

mod append;
mod decode;
mod folder;
mod frames;
mod ipc;
mod kinds;
mod read;
mod recorder;
mod replay;
mod retrace;
mod row;
mod tap;
mod traffic;
mod writer;

pub use self::kinds::Recordable;
pub use self::read::{MAX_RECORDING_BYTES, Recording, RecordingError, Rows};
pub use self::recorder::{Recorder, RecorderSettings, RecordingWatch};
pub use self::replay::{Difference, ReplayError, ReplayOptions, ReplayReport, Start, replay};
pub use self::retrace::{Retraced, retrace};
pub use self::row::{Header, Outcome, Recorded, RecordedPolicy, RecordedTargets};
pub use self::tap::{MAX_CANDIDATES, SlotSetup, Tap};
pub use self::traffic::{RowEngine, RowRequest, each_row};
