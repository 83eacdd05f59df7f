//! The commands' side: finds the daemon of a path and talks to it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use super::{HintAnswer, HintRequest, PathsLine, PathsRequest};
use crate::telemetry::ProcessStatus;

/// A daemon that does not begin to answer by this is not there.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// Why a command can't reach its daemon.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The path is in no mount of ours.
    #[error("{0}: not in a KSpeed mount (`kspeed status` lists them)")]
    NotMounted(PathBuf),
    /// The daemon can't be reached.
    #[error(
        "{socket}: the daemon does not answer ({detail}); is it running, and are you its user?"
    )]
    Unreachable {
        /// Its socket.
        socket: PathBuf,
        /// The cause.
        detail: String,
    },
    /// It answered with an error.
    #[error("{0}")]
    Refused(String),
}

/// All KSpeed mountpoints of this machine, from the kernel's table.
#[must_use]
pub fn mounts() -> Vec<PathBuf> {
    let text = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    text.lines()
        .filter_map(|l| {
            let mut f = l.split(' ');
            let (source, mountpoint, kind) = (f.next()?, f.next()?, f.next()?);
            let ours = kind.starts_with("fuse") && source.starts_with(crate::mount::FS_NAME);
            ours.then(|| unescape(mountpoint))
        })
        .collect()
}

/// The kernel writes space, tab, newline and backslash as octal.
fn unescape(s: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let mut out = Vec::with_capacity(s.len());
    let mut rest = s.as_bytes();
    while let Some((b, tail)) = rest.split_first() {
        let octal = (*b == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|o| std::str::from_utf8(o).ok())
            .and_then(|o| u8::from_str_radix(o, 8).ok());
        match octal {
            Some(v) => {
                out.push(v);
                rest = &tail[3..];
            }
            None => {
                out.push(*b);
                rest = tail;
            }
        }
    }
    std::ffi::OsString::from_vec(out).into()
}

/// The mount that a path is in, and the path relative to it.
///
/// # Errors
/// It is in none.
pub fn daemon_of(path: &Path) -> Result<(PathBuf, PathBuf), ClientError> {
    let absolute = std::path::absolute(path).map_err(|_| ClientError::NotMounted(path.into()))?;
    let best = mounts()
        .into_iter()
        .filter(|m| absolute.starts_with(m))
        .max_by_key(|m| m.components().count());
    match best {
        Some(m) => {
            let relative = absolute.strip_prefix(&m).unwrap_or(Path::new("")).to_path_buf();
            Ok((m, relative))
        }
        None => Err(ClientError::NotMounted(absolute)),
    }
}

/// A daemon's control socket.
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// Of the daemon that serves a mountpoint.
    ///
    /// # Errors
    /// Nothing of ours is mounted there, or the daemon is dead.
    pub fn of_mount(mountpoint: &Path) -> Result<Self, ClientError> {
        let file = mountpoint.join(".kspeed/status");
        let text = std::fs::read_to_string(&file).map_err(|e| ClientError::Unreachable {
            socket: file.clone(),
            detail: e.to_string(),
        })?;
        let status: ProcessStatus = serde_json::from_str(&text)
            .map_err(|e| ClientError::Unreachable { socket: file, detail: e.to_string() })?;
        Ok(Self { socket: status.control })
    }

    /// At a socket.
    #[must_use]
    pub fn at(socket: PathBuf) -> Self {
        Self { socket }
    }

    fn unreachable(&self, e: impl std::fmt::Display) -> ClientError {
        ClientError::Unreachable { socket: self.socket.clone(), detail: e.to_string() }
    }

    async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<hyper::Response<hyper::body::Incoming>, ClientError> {
        let exchange = async {
            let stream =
                UnixStream::connect(&self.socket).await.map_err(|e| self.unreachable(e))?;
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream))
                    .await
                    .map_err(|e| self.unreachable(e))?;
            // Ends with the exchange: the sender or the body holds it open.
            tokio::spawn(connection);
            sender.send_request(request).await.map_err(|e| self.unreachable(e))
        };
        tokio::time::timeout(CONNECT_DEADLINE, exchange)
            .await
            .unwrap_or_else(|_| Err(self.unreachable("no answer within 10 s")))
    }

    fn request(path: &str, body: Option<Vec<u8>>) -> Result<Request<Full<Bytes>>, ClientError> {
        let method = if body.is_some() { "POST" } else { "GET" };
        Request::builder()
            .method(method)
            .uri(path)
            .header("host", "kspeed")
            .header("content-type", "application/json")
            .body(Full::new(body.unwrap_or_default().into()))
            .map_err(|e| ClientError::Refused(e.to_string()))
    }

    /// GET of a text.
    ///
    /// # Errors
    /// The daemon can't be reached or refuses.
    pub async fn get(&self, path: &str) -> Result<String, ClientError> {
        self.text(Self::request(path, None)?).await
    }

    async fn text(&self, request: Request<Full<Bytes>>) -> Result<String, ClientError> {
        let r = self.send(request).await?;
        let ok = r.status().is_success();
        let body = r.into_body().collect().await.map_err(|e| self.unreachable(e))?.to_bytes();
        let text = String::from_utf8_lossy(&body).into_owned();
        if ok { Ok(text) } else { Err(ClientError::Refused(text)) }
    }

    /// Tells an order.
    ///
    /// # Errors
    /// The daemon can't be reached or refuses.
    pub async fn hint(&self, r: &HintRequest) -> Result<HintAnswer, ClientError> {
        let body = serde_json::to_vec(r).map_err(|e| ClientError::Refused(e.to_string()))?;
        let text = self.text(Self::request("/hint", Some(body))?).await?;
        serde_json::from_str(&text).map_err(|e| self.unreachable(e))
    }

    /// Does something to paths; each line is handed on as it comes.
    ///
    /// # Errors
    /// The daemon can't be reached, refuses, or goes away.
    pub async fn paths(
        &self,
        r: &PathsRequest,
        mut each: impl FnMut(PathsLine),
    ) -> Result<(), ClientError> {
        let body = serde_json::to_vec(r).map_err(|e| ClientError::Refused(e.to_string()))?;
        let response = self.send(Self::request("/paths", Some(body))?).await?;
        let ok = response.status().is_success();
        let mut stream = response.into_body();
        let mut text = Vec::new();
        let mut done = false;
        while let Some(frame) = stream.frame().await {
            let frame = frame.map_err(|e| self.unreachable(e))?;
            let Some(data) = frame.data_ref() else { continue };
            text.extend_from_slice(data);
            if !ok {
                continue;
            }
            while let Some(i) = text.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = text.drain(..=i).collect();
                let line: PathsLine =
                    serde_json::from_slice(&line).map_err(|e| self.unreachable(e))?;
                done |= matches!(line, PathsLine::Done { .. });
                each(line);
            }
        }
        if !ok {
            return Err(ClientError::Refused(String::from_utf8_lossy(&text).into_owned()));
        }
        if done { Ok(()) } else { Err(self.unreachable("it went away")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountpoints_with_spaces_are_read_from_the_kernels_table() {
        assert_eq!(unescape("/mnt/a\\040b\\134c"), PathBuf::from("/mnt/a b\\c"));
        assert_eq!(unescape("/mnt/\\0"), PathBuf::from("/mnt/\\0"));
    }
}
