//! What a replay found, for people: a page for the browser, a table for the terminal, a short one for documents.
//!
//! Names of policies and tenants and the words of events come from files and command lines; they are escaped wherever
//! they are shown.

pub(crate) mod format;
mod grid;
mod heat;
mod page;
pub(crate) mod plots;
mod text;

pub use heat::heat_map;
pub use page::html;
pub use text::{markdown, table, tuned};
