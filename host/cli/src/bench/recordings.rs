//! Recordings of one engine process, given by their files or their folder.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use meridian_core::SlotName;
use meridian_engine::recording::Recording;

use crate::replay::sort_as_written;
use crate::say;

/// Most files of a folder.
const MOST_FILES: usize = 4096;

/// The recordings of the dispatch slot, which have the requests, in the order of writing, and those of other slots.
pub(super) fn open(given: &[PathBuf]) -> anyhow::Result<(Vec<Recording>, Vec<Recording>)> {
    let files = files(given)?;
    let all = files.iter().map(|file| Recording::open(file)).collect::<Result<Vec<_>, _>>()?;
    let (mut dispatch, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|recording| recording.slot() == SlotName::Dispatch);
    let named = || given.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
    ensure!(!dispatch.is_empty(), "{}: no recording of the dispatch slot, which has the requests", named());
    sort_as_written(&mut dispatch, Recording::header);
    for recording in &dispatch {
        if let Some(cut) = recording.cut() {
            say(&format!("note: {}: {cut}", recording.file()));
        }
    }
    Ok((dispatch, others))
}

/// Whether a path is a recording, or a folder of them, rather than a trace.
pub(super) fn are_at(path: &Path) -> bool {
    path.is_dir() || path.extension().is_some_and(|extension| extension == "arrow")
}

/// What recordings are called together.
pub(super) fn name(recordings: &[Recording]) -> String {
    let of = |recording: &Recording| recording.file().rsplit('/').next().unwrap_or_default().to_owned();
    match recordings {
        [one] => of(one),
        [first, .., last] => format!("{} to {}", of(first), of(last)),
        [] => String::new(),
    }
}

/// The files, and those of the folders that are recordings by their name.
fn files(given: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in given {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let failed = || format!("{}: cannot be read", path.display());
        for entry in std::fs::read_dir(path).with_context(failed)? {
            let file = entry.with_context(failed)?.path();
            let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let is_recording = name.ends_with(".arrow")
                && SlotName::ALL
                    .iter()
                    .any(|slot| name.strip_prefix(slot.label()).is_some_and(|rest| rest.starts_with('-')));
            if is_recording {
                files.push(file);
            }
        }
    }
    ensure!(files.len() <= MOST_FILES, "{} files: expected at most {MOST_FILES}", files.len());
    files.sort();
    Ok(files)
}
