use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The content of a regular file; `None` when it has more than `limit` bytes, of which no more are read.
///
/// # Errors
/// It cannot be read, or is a folder, a pipe or a device: opening a pipe would wait for its other end.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    require_regular(&path.metadata()?)?;
    let file = File::open(path)?;
    // What was opened may be another file than what was looked at.
    require_regular(&file.metadata()?)?;
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= limit).then_some(bytes))
}

fn require_regular(metadata: &std::fs::Metadata) -> io::Result<()> {
    if metadata.is_file() { Ok(()) } else { Err(io::Error::other("not a regular file")) }
}
