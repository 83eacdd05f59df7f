//! `kspeed-s3d`: serves a directory over the S3 protocol, on loopback.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use kspeed_s3_server::{FaultKind, Options, Server, Shape};

/// Serves the subdirectories of ROOT as S3 buckets, with shaping and faults.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Directory whose subdirectories are buckets.
    root: PathBuf,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:9900")]
    listen: SocketAddr,
    /// Access key that is accepted.
    #[arg(long, default_value = "kspeed")]
    access_key: String,
    /// Its secret.
    #[arg(long, default_value = "kspeed-secret")]
    secret_key: String,
    /// Buckets to make at the start.
    #[arg(long)]
    bucket: Vec<String>,
    /// Time to first byte of each answer.
    #[arg(long, default_value = "0ms", value_parser = humantime::parse_duration)]
    latency: Duration,
    /// Bytes per second of one connection.
    #[arg(long)]
    connection_rate: Option<u64>,
    /// Bytes per second of all connections together.
    #[arg(long)]
    total_rate: Option<u64>,
    /// Fault of every N-th GET: slow-down, internal-error, cut-body, short-body,
    /// wrong-range, xml-as-data or hang, as KIND:N.
    #[arg(long, value_parser = fault)]
    fault: Option<(FaultKind, u64)>,
    /// Worker threads.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

fn fault(s: &str) -> Result<(FaultKind, u64), String> {
    let (kind, n) = s.split_once(':').ok_or("expected KIND:N")?;
    let kind = match kind {
        "slow-down" => FaultKind::SlowDown,
        "internal-error" => FaultKind::InternalError,
        "cut-body" => FaultKind::CutBody,
        "short-body" => FaultKind::ShortBody,
        "wrong-range" => FaultKind::WrongRange,
        "xml-as-data" => FaultKind::XmlAsData,
        "hang" => FaultKind::Hang,
        other => return Err(format!("no such fault: {other}")),
    };
    Ok((kind, n.parse().map_err(|e| format!("{n}: {e}"))?))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(args.threads)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let server = Server::start(Options {
            root: args.root,
            listen: args.listen,
            credentials: (args.access_key, args.secret_key),
            shape: Shape {
                latency: args.latency,
                connection_rate: args.connection_rate,
                total_rate: args.total_rate,
            },
        })
        .await?;
        for b in &args.bucket {
            server.store().create_bucket(b)?;
        }
        if let Some((kind, n)) = args.fault {
            server.faults().every_get(n, kind);
        }
        println!("{}", server.endpoint());
        server.serve().await;
        Ok(())
    })
}
