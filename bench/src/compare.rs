//! The same work on KSpeed, on other mounts that are installed, and on the disk.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Result;
use crate::measure::{files, median, read_files, scan, sequential, shuffled};
use crate::world::{
    BUCKET, KEY, Mount, SECRET, Server, Setup, Shape, drop_caches, noise_file, small_files,
};

const WORK: [&str; 6] = [
    "large, cold (MB/s)",
    "large, warm (MB/s)",
    "small files, cold (files/s)",
    "small files, warm, 1 reader (files/s)",
    "small files, warm, 4 readers (files/s)",
    "scandir + stat, warm (entries/s)",
];

/// Another mount, as its documentation says to start it with a disk cache.
struct Peer {
    child: Child,
    path: PathBuf,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn on_path(name: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|p| std::env::split_paths(&p).any(|d| d.join(name).exists()))
}

fn peer(name: &str, server: &Server, path: &Path, cache: &Path) -> Result<Peer> {
    fs::create_dir_all(path)?;
    fs::create_dir_all(cache)?;
    let mut c = Command::new(name);
    c.env("AWS_ACCESS_KEY_ID", KEY)
        .env("AWS_SECRET_ACCESS_KEY", SECRET)
        .env("AWS_REGION", "us-east-1");
    // rclone 1.60 can't start with it, and loopback needs no CA.
    c.env_remove("AWS_CA_BUNDLE");
    match name {
        "mount-s3" => {
            c.args([
                "--endpoint-url",
                &server.endpoint,
                "--force-path-style",
                "--foreground",
                "--cache",
            ]);
            c.arg(cache).args(["--metadata-ttl", "indefinite", BUCKET]).arg(path);
        }
        "rclone" => {
            let remote = format!(
                ":s3,provider=Other,env_auth=true,force_path_style=true,list_version=2,region=us-east-1,endpoint='{}':{BUCKET}",
                server.endpoint
            );
            c.args(["mount", &remote]).arg(path);
            c.args(["--vfs-cache-mode", "full", "--dir-cache-time", "1h", "--cache-dir"])
                .arg(cache);
        }
        "s3fs" => {
            let passwd = cache.with_extension("passwd");
            fs::write(&passwd, format!("{KEY}:{SECRET}"))?;
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(&passwd, fs::Permissions::from_mode(0o600))?;
            c.arg(BUCKET).arg(path).args(["-f", "-o", "use_path_request_style"]);
            c.args(["-o", &format!("url={}", server.endpoint)]);
            c.args(["-o", &format!("passwd_file={}", passwd.display())]);
            c.args(["-o", &format!("use_cache={}", cache.display())]);
            c.args(["-o", "listobjectsv2", "-o", "stat_cache_expire=3600"]);
        }
        _ => return Err(format!("no peer {name}").into()),
    }
    let child = c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let mut p = Peer { child, path: path.to_path_buf() };
    let began = Instant::now();
    while fs::metadata(path.join("large")).is_err() {
        if p.child.try_wait()?.is_some() || began.elapsed() > Duration::from_secs(20) {
            return Err(format!("{name} does not mount").into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(p)
}

fn work(setup: &Setup, root: &Path) -> Result<Vec<f64>> {
    let large = root.join("large");
    let d = root.join("d");
    let mut out = vec![sequential(&large)?];
    let again = (0..setup.rounds).map(|_| sequential(&large)).collect::<Result<Vec<_>>>()?;
    out.push(median(&again));
    let list = files(&d)?;
    out.push(read_files(&list, 4)?);
    for readers in [1, 4] {
        let rounds = (0..setup.rounds as u64)
            .map(|r| read_files(&shuffled(list.clone(), r), readers))
            .collect::<Result<Vec<_>>>()?;
        out.push(median(&rounds));
    }
    let rounds = (0..setup.rounds).map(|_| scan(&d)).collect::<Result<Vec<_>>>()?;
    out.push(median(&rounds));
    Ok(out)
}

/// Measures and writes `table.md` and `plot.svg`.
pub fn run(setup: &Setup, out: &Path) -> Result<()> {
    let dir = setup.scratch()?;
    let s3 = dir.path().join("s3");
    let native = dir.path().join("native");
    for root in [&s3.join(BUCKET), &native] {
        noise_file(&root.join("large"), setup.of(1 << 30), 1)?;
        small_files(&root.join("d"), setup.of(5000))?;
    }
    let server = Server::start(&s3, Shape::default())?;
    let mut results: Vec<(String, Vec<f64>)> = Vec::new();
    for (name, args) in [("KSpeed", &[][..]), ("KSpeed --read-only", &["--read-only"][..])] {
        let cache = dir.path().join(format!("cache-{}", results.len()));
        let args = [args, &["--metadata-ttl", "1h"]].concat();
        drop_caches()?;
        let m = Mount::new(&server, &dir.path().join("mnt"), &cache, &args)?;
        results.push((name.into(), work(setup, &m.path)?));
    }
    for name in ["mount-s3", "rclone", "s3fs"] {
        if !on_path(name) {
            println!("{name} is not on the PATH");
            continue;
        }
        drop_caches()?;
        let cache = dir.path().join(format!("cache-{name}"));
        match peer(name, &server, &dir.path().join("peer"), &cache) {
            Ok(p) => results.push((name.into(), work(setup, &p.path)?)),
            Err(e) => println!("{name}: {e}"),
        }
    }
    drop_caches()?;
    results.push(("local disk".into(), work(setup, &native)?));
    let table = table(&results);
    println!("{table}");
    fs::create_dir_all(out)?;
    fs::write(out.join("table.md"), table)?;
    fs::write(out.join("plot.svg"), plot(&results))?;
    Ok(())
}

fn table(results: &[(String, Vec<f64>)]) -> String {
    let mut t = String::from("| work |");
    for (name, _) in results {
        let _ = write!(t, " {name} |");
    }
    t.push_str("\n|---|");
    t.push_str(&"---|".repeat(results.len()));
    for (i, w) in WORK.iter().enumerate() {
        let _ = write!(t, "\n| {w} |");
        for (_, v) in results {
            let _ = write!(t, " {:.0} |", v[i]);
        }
    }
    t.push('\n');
    t
}

/// Bars of each work, as parts of the best.
fn plot(results: &[(String, Vec<f64>)]) -> String {
    const COLORS: [&str; 6] = ["#0b6e4f", "#54b399", "#d08c60", "#b5838d", "#6d6875", "#adb5bd"];
    const BAR: usize = 14;
    const LEFT: usize = 250;
    const WIDTH: f64 = 420.0;
    let group = results.len() * BAR + 22;
    let height = WORK.len() * group + 20;
    let mut s = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"860\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (i, w) in WORK.iter().enumerate() {
        let top = i * group + 12;
        let best = results.iter().map(|r| r.1[i]).fold(0.0, f64::max);
        let _ = writeln!(s, "<text x=\"8\" y=\"{}\">{w}</text>", top + 12);
        for (j, (name, v)) in results.iter().enumerate() {
            let y = top + j * BAR;
            let _ = writeln!(
                s,
                "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{:.1}\" height=\"{}\" fill=\"{}\"/><text x=\"{:.1}\" y=\"{}\" font-size=\"10\">{name} {:.0}</text>",
                v[i] / best * WIDTH,
                BAR - 2,
                COLORS[j % COLORS.len()],
                LEFT as f64 + v[i] / best * WIDTH + 4.0,
                y + 10,
                v[i]
            );
        }
    }
    s.push_str("</svg>\n");
    s
}
