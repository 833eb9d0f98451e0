//! Binding to ports and Unix sockets, where several processes may share one configuration.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use meridian_core::config::Listen;

use super::routes::Reach;
use super::tls::Certificate;

/// Connections that the system queues before they are accepted.
const BACKLOG: u32 = 64;

/// A bound socket.
pub(super) struct Listener {
    pub(super) socket: Socket,
    /// Its address, as in the configuration.
    pub(super) address: String,
    /// The file to remove on close.
    pub(super) file: Option<SocketFile>,
}

pub(super) enum Socket {
    Tcp { listener: tokio::net::TcpListener, reach: Reach },
    Tls { listener: tokio::net::TcpListener, certificate: Arc<Certificate>, reach: Reach },
    Unix(tokio::net::UnixListener),
}

/// The action if another process already listens there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WhereTaken {
    /// Do not listen: clients that send a token to the address must not expect this process there.
    Fail,
    /// Take any free port, or `PATH.PID` for a socket file.
    Move,
}

impl Listener {
    /// Bind; `None` for off. A port is encrypted with the certificate, if there is one. `beyond` is what a port is for that
    /// other machines reach; one that shows more than metrics needs the certificate. Needs the context of a tokio runtime.
    ///
    /// # Errors
    /// The error of the system.
    pub(super) fn bind(
        listen: &Listen,
        run_dir: Option<&Path>,
        where_taken: WhereTaken,
        certificate: Option<Arc<Certificate>>,
        beyond: Reach,
    ) -> io::Result<Option<Self>> {
        let reach = if listen.is_of_this_machine() { Reach::Loopback } else { beyond };
        match listen {
            Listen::Off => Ok(None),
            Listen::Tcp(_) if certificate.is_none() && !matches!(reach, Reach::Loopback | Reach::Scrapers) => {
                Err(io::Error::other("no port beyond loopback without TLS"))
            }
            Listen::Tcp(address) => Self::tcp(*address, where_taken, certificate, reach).map(Some),
            Listen::Unix(path) => {
                // Between binding and listening, a socket looks stale to another starting process. Best effort.
                let lock = run_dir.and_then(|dir| File::create(dir.join("bind.lock")).ok());
                if let Some(lock) = &lock {
                    let _ = lock.lock();
                }
                match Self::unix(path) {
                    Err(error) if error.kind() == ErrorKind::AddrInUse && where_taken == WhereTaken::Move => {
                        let mut own = path.as_os_str().to_owned();
                        own.push(format!(".{}", std::process::id()));
                        Self::unix(Path::new(&own)).map(Some)
                    }
                    bound => bound.map(Some),
                }
            }
        }
    }

    pub(super) fn is_elsewhere(&self, listen: &Listen) -> bool {
        match listen {
            Listen::Off => false,
            Listen::Tcp(address) => {
                let own = self.address.strip_prefix("https://").unwrap_or(&self.address);
                address.port() != 0 && own != address.to_string()
            }
            Listen::Unix(path) => self.address != unix_address(path),
        }
    }

    fn tcp(
        address: SocketAddr,
        where_taken: WhereTaken,
        certificate: Option<Arc<Certificate>>,
        reach: Reach,
    ) -> io::Result<Self> {
        let socket = match TcpListener::bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && where_taken == WhereTaken::Move => {
                TcpListener::bind(SocketAddr::new(address.ip(), 0))?
            }
            bound => bound?,
        };
        socket.set_nonblocking(true)?;
        let address = socket.local_addr()?.to_string();
        let listener = tokio::net::TcpListener::from_std(socket)?;
        Ok(match certificate {
            Some(certificate) => {
                let address = format!("https://{address}");
                Self { socket: Socket::Tls { listener, certificate, reach }, address, file: None }
            }
            None => Self { socket: Socket::Tcp { listener, reach }, address, file: None },
        })
    }

    fn unix(path: &Path) -> io::Result<Self> {
        let bind = || {
            let socket = tokio::net::UnixSocket::new_stream()?;
            socket.bind(path).map(|()| socket)
        };
        let socket = match bind() {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                if !is_stale(path)? {
                    return Err(error);
                }
                fs::remove_file(path)?;
                bind()?
            }
            bound => bound?,
        };
        let file = SocketFile::of(path)?;
        // No client can connect before it listens.
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok(Self { socket: Socket::Unix(socket.listen(BACKLOG)?), address: unix_address(path), file: Some(file) })
    }
}

fn unix_address(path: &Path) -> String {
    format!("unix:{}", path.display())
}

/// Whether this is a socket file without a listener. Any other file of this name is left alone.
fn is_stale(path: &Path) -> io::Result<bool> {
    let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
    Ok(is_socket && UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused))
}

/// A socket file of this process. Dropping it removes the file, unless another has taken its place.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    id: (u64, u64),
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), id: file_id(path)? })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if file_id(&self.path).is_ok_and(|id| id == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn file_id(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}
