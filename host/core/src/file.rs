//! The only reader of files that callers name.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
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
/// It cannot be read, is a folder, a pipe or a device, or makes its reader wait.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let (file, metadata) = open_regular(path)?;
    if metadata.len() > limit {
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

/// A regular file, opened for reading in pieces, and what the system says of it.
///
/// # Errors
/// As [`read_regular`].
pub fn open_regular(path: &Path) -> io::Result<(RegularFile, Metadata)> {
    // Opening a device may act on it.
    require_regular(&path.metadata()?)?;
    // Neither opening a pipe nor reading a file of the kernel, such as /proc/kmsg, waits for what is to come.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    // The opened file may differ from the checked one.
    let metadata = file.metadata()?;
    require_regular(&metadata)?;
    Ok((RegularFile(file), metadata))
}

/// A file of [`open_regular`].
#[derive(Debug)]
pub struct RegularFile(File);

impl Read for RegularFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => io::Error::other("not a regular file: it makes its reader wait"),
            _ => error,
        })
    }
}

fn require_regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() { Ok(()) } else { Err(io::Error::other("not a regular file")) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// As of a file of the kernel, such as /proc/kmsg, which looks like a regular one.
    #[test]
    fn no_file_makes_its_reader_wait() {
        let (RegularFile(file), _) = open_regular(&std::env::current_exe().expect("a test")).expect("readable");
        let flags = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).expect("Linux tells");
        let flags = flags.lines().find_map(|line| line.strip_prefix("flags:")).expect("its flags");
        let flags = i32::from_str_radix(flags.trim(), 8).expect("octal");
        assert_eq!(flags & libc::O_NONBLOCK, libc::O_NONBLOCK);

        let (waits, _other) = UnixStream::pair().expect("a pair");
        waits.set_nonblocking(true).expect("a socket");
        let error = RegularFile(std::os::fd::OwnedFd::from(waits).into()).read(&mut [0]).expect_err("nothing was sent");
        assert_eq!(error.to_string(), "not a regular file: it makes its reader wait");
    }
}
