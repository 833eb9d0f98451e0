//! The only reader of files that callers name.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The content of a regular file; `None` when it has more than `limit` bytes. The function does not read a file with
/// such a length; if a file grows meanwhile, it reads at most one byte more.
///
/// ```
/// use meridian_core::file::read_regular;
///
/// let error = read_regular("/".as_ref(), 10).unwrap_err();
/// assert_eq!(error.to_string(), "not a regular file");
/// ```
///
/// # Errors
/// It cannot be read, or is a folder, a pipe or a device.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let (file, length) = open_regular(path)?;
    if length > limit {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= limit).then_some(bytes))
}

/// The text of a regular file of at most `limit` bytes.
///
/// # Errors
/// As [`read_regular`]; it is larger, or no UTF-8 text.
pub fn read_regular_text(path: &Path, limit: u64) -> io::Result<String> {
    let bytes = read_regular(path, limit)?;
    let bytes = bytes.ok_or_else(|| io::Error::other(format!("more than {limit} bytes, expected at most that")))?;
    String::from_utf8(bytes).map_err(|_| io::Error::other("not UTF-8 text"))
}

/// A regular file, opened for reading in pieces, and its length in bytes.
///
/// # Errors
/// As [`read_regular`].
pub fn open_regular(path: &Path) -> io::Result<(File, u64)> {
    // Opening a pipe would wait for its other end.
    require_regular(&path.metadata()?)?;
    let file = File::open(path)?;
    // The opened file may differ from the checked one.
    let metadata = file.metadata()?;
    require_regular(&metadata)?;
    Ok((file, metadata.len()))
}

fn require_regular(metadata: &std::fs::Metadata) -> io::Result<()> {
    if metadata.is_file() { Ok(()) } else { Err(io::Error::other("not a regular file")) }
}
