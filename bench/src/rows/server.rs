//! The S3 server alone: what it can give to a client that does nothing else.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use aws_sdk_s3::config::{Credentials, Region};
use aws_sdk_s3::presigning::PresigningConfig;

use crate::Result;
use crate::report::Row;
use crate::world::{BUCKET, KEY, SECRET, Server, Setup, Shape, noise_file};

/// A client of a few lines, so that the server is the limit: one presigned GET,
/// sent again and again.
struct Raw {
    stream: TcpStream,
    request: Vec<u8>,
    buf: Vec<u8>,
}

impl Raw {
    /// One exchange: bytes of the body.
    fn exchange(&mut self) -> Result<u64> {
        self.stream.write_all(&self.request)?;
        let mut have = 0;
        let (head, length) = loop {
            let n = self.stream.read(&mut self.buf[have..])?;
            if n == 0 {
                return Err("the server closed the connection".into());
            }
            have += n;
            if let Some(i) = self.buf[..have].windows(4).position(|w| w == b"\r\n\r\n") {
                let text = String::from_utf8_lossy(&self.buf[..i]).to_ascii_lowercase();
                if !text.starts_with("http/1.1 20") {
                    return Err(text.into());
                }
                let length: u64 = text
                    .lines()
                    .find_map(|l| l.strip_prefix("content-length:"))
                    .ok_or("no length")?
                    .trim()
                    .parse()?;
                break (i + 4, length);
            }
        };
        let mut left = length - (have - head) as u64;
        while left > 0 {
            let n = self.stream.read(&mut self.buf)?;
            if n == 0 {
                return Err("cut".into());
            }
            left -= n as u64;
        }
        Ok(length)
    }
}

/// The bytes of a presigned GET.
fn signed_get(server: &Server, key: &str) -> Result<Vec<u8>> {
    let credentials = Credentials::new(KEY, SECRET, None, None, "bench");
    let config = aws_sdk_s3::Config::builder()
        .behavior_version_latest()
        .region(Region::new("us-east-1"))
        .credentials_provider(credentials)
        .endpoint_url(&server.endpoint)
        .force_path_style(true)
        .build();
    let client = aws_sdk_s3::Client::from_conf(config);
    let signing = PresigningConfig::expires_in(Duration::from_secs(600))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let signed =
        runtime.block_on(client.get_object().bucket(BUCKET).key(key).presigned(signing))?;
    let host = server.endpoint.trim_start_matches("http://");
    let path = signed.uri().trim_start_matches(&server.endpoint);
    Ok(format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n").into_bytes())
}

pub fn server(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let dir = setup.scratch()?;
    let s3 = dir.path().join("s3");
    noise_file(&s3.join(BUCKET).join("large"), setup.of(256 << 20), 1)?;
    noise_file(&s3.join(BUCKET).join("small"), 110_000, 1)?;
    let server = Server::start(&s3, Shape::default())?;
    for (key, connections, name, unit, least) in [
        ("large", 2usize, "S3 server: large GETs", "MB/s", 1000.0),
        ("small", 4, "S3 server: GETs of 110 KB", "requests/s", 2500.0),
    ] {
        let request = signed_get(&server, key)?;
        let address = server.endpoint.trim_start_matches("http://").to_owned();
        let until = Instant::now() + Duration::from_secs(3);
        let began = Instant::now();
        let (requests, bytes) = std::thread::scope(|s| -> Result<(u64, u64)> {
            let threads: Vec<_> = (0..connections)
                .map(|_| {
                    let (request, address) = (request.clone(), address.clone());
                    s.spawn(move || -> std::result::Result<(u64, u64), String> {
                        let stream = TcpStream::connect(address).map_err(|e| e.to_string())?;
                        let mut raw = Raw { stream, request, buf: vec![0; 1 << 20] };
                        let (mut n, mut bytes) = (0, 0);
                        while Instant::now() < until {
                            bytes += raw.exchange().map_err(|e| e.to_string())?;
                            n += 1;
                        }
                        Ok((n, bytes))
                    })
                })
                .collect();
            let mut all = (0, 0);
            for t in threads {
                let (n, b) = t.join().map_err(|_| "a client panicked")??;
                all = (all.0 + n, all.1 + b);
            }
            Ok(all)
        })?;
        let seconds = began.elapsed().as_secs_f64();
        let value = if unit == "MB/s" { bytes as f64 / 1e6 } else { requests as f64 } / seconds;
        out(Row::ratio(name, value, "what is needed", least, unit, 1.0));
    }
    Ok(())
}
