//! The S3 origin against a real S3 server over HTTP: ours by default, or any
//! endpoint named by KSPEED_TEST_S3_ENDPOINT (with KSPEED_TEST_S3_BUCKET, and
//! credentials as the SDK finds them).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kspeed_cache::origin::{
    Limit, Origin, OriginError, PutBody, PutOptions, Retry, RetryPolicy, S3Config, S3Origin,
    collect, conformance,
};
use kspeed_s3_server::{FaultKind, Options, Server};

/// Credentials are the process's: one set for all tests here.
fn credentials() {
    if std::env::var_os("KSPEED_TEST_S3_ENDPOINT").is_none() {
        // SAFETY: nextest runs each test in a process of its own, and this is
        // the first thing that a test does, before any thread is started.
        unsafe {
            std::env::set_var("AWS_ACCESS_KEY_ID", "kspeed");
            std::env::set_var("AWS_SECRET_ACCESS_KEY", "kspeed-secret");
            std::env::set_var("AWS_REGION", "us-east-1");
        }
    }
}

fn run(test: impl Future<Output = ()>) {
    credentials();
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("runtime")
        .block_on(test);
}

async fn server(dir: &std::path::Path) -> Server {
    let s = Server::start(Options::loopback(dir)).await.expect("server");
    s.store().create_bucket("bucket").expect("bucket");
    s
}

async fn origin(server: &Server, prefix: &str) -> S3Origin {
    S3Origin::new(S3Config {
        bucket: "bucket".into(),
        prefix: prefix.into(),
        endpoint: Some(server.endpoint()),
        request_timeout: Duration::from_secs(5),
        ..S3Config::default()
    })
    .await
}

fn patient(inner: Arc<dyn Origin>) -> Arc<dyn Origin> {
    let policy = RetryPolicy {
        deadline: Duration::from_secs(60),
        first_pause: Duration::from_millis(2),
        max_pause: Duration::from_millis(50),
    };
    Arc::new(Retry::new(Arc::new(Limit::new(inner, 16, None)), policy))
}

#[test]
fn conforms() {
    run(async {
        if let Ok(endpoint) = std::env::var("KSPEED_TEST_S3_ENDPOINT") {
            let o = S3Origin::new(S3Config {
                bucket: std::env::var("KSPEED_TEST_S3_BUCKET").expect("KSPEED_TEST_S3_BUCKET"),
                endpoint: Some(endpoint),
                ..S3Config::default()
            })
            .await;
            let no_control_characters = std::env::var_os("KSPEED_TEST_S3_NO_CONTROL").is_some();
            let traits = conformance::Traits { no_control_characters, ..Default::default() };
            conformance::run_on(Arc::new(o), traits).await;
            return;
        }
        let dir = tempfile::tempdir().expect("tempdir");
        let s = server(dir.path()).await;
        conformance::run(Arc::new(origin(&s, "").await)).await;
        conformance::run(Arc::new(origin(&s, "some/prefix/").await)).await;
    });
}

/// F1: whatever a store sends instead of the range, it is tried again and
/// never served as data.
#[test]
fn f1_conforms_while_the_store_misbehaves() {
    run(async {
        let dir = tempfile::tempdir().expect("tempdir");
        let s = server(dir.path()).await;
        for kind in [
            FaultKind::InternalError,
            FaultKind::SlowDown,
            FaultKind::CutBody,
            FaultKind::ShortBody,
            FaultKind::WrongRange,
            FaultKind::XmlAsData,
        ] {
            if matches!(kind, FaultKind::InternalError | FaultKind::SlowDown) {
                s.faults().every(4, kind);
            } else {
                s.faults().every_get(2, kind);
            }
            conformance::run(patient(Arc::new(origin(&s, "").await))).await;
            s.faults().heal();
        }
    });
}

/// F7: a store that takes requests and never answers ends them by a deadline.
#[test]
fn f7_a_hanging_store_ends_by_the_deadline() {
    run(async {
        let dir = tempfile::tempdir().expect("tempdir");
        let s = server(dir.path()).await;
        let o = S3Origin::new(S3Config {
            bucket: "bucket".into(),
            endpoint: Some(s.endpoint()),
            request_timeout: Duration::from_millis(300),
            ..S3Config::default()
        })
        .await;
        let meta = o
            .put(&"k".into(), PutBody::Bytes(Bytes::from_static(b"abc")), &PutOptions::default())
            .await
            .expect("put");
        s.faults().every(1, FaultKind::Hang);
        let t = std::time::Instant::now();
        let e = o.head(&"k".into()).await.expect_err("hangs");
        assert!(e.is_transient(), "{e}");
        assert!(o.get(&meta, 0..3).await.is_err());
        assert!(t.elapsed() < Duration::from_secs(3));
        s.faults().heal();
        assert_eq!(collect(o.get(&meta, 0..3).await.expect("get")).await.expect("body"), "abc");
    });
}

/// F3: credentials that expire are read again from their source.
#[test]
fn f3_expired_credentials_are_read_again() {
    run(async {
        let dir = tempfile::tempdir().expect("tempdir");
        let s = server(dir.path()).await;
        let file = dir.path().join("credentials");
        let write = |key: &str, secret: &str| {
            let text =
                format!("[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n");
            std::fs::write(&file, text).expect("write");
        };
        write("kspeed", "kspeed-secret");
        // SAFETY: as in `credentials`; the runtime's threads do not read the
        // environment before the SDK is loaded below.
        unsafe {
            std::env::remove_var("AWS_ACCESS_KEY_ID");
            std::env::remove_var("AWS_SECRET_ACCESS_KEY");
            std::env::set_var("AWS_SHARED_CREDENTIALS_FILE", &file);
        }
        let o = patient(Arc::new(origin(&s, "").await));
        let data: Bytes = vec![5u8; 3_000_000].into();
        let meta = o
            .put(&"k".into(), PutBody::Bytes(data.clone()), &PutOptions::default())
            .await
            .expect("put");
        write("kspeed2", "other");
        s.rotate_credentials("kspeed2", "other");
        assert!(
            collect(o.get(&meta, 0..3_000_000).await.expect("get")).await.expect("body") == data
        );
        assert!(o.put(&"k2".into(), PutBody::Bytes(data), &PutOptions::default()).await.is_ok());
    });
}

#[test]
fn wrong_credentials_and_buckets_are_told_apart() {
    run(async {
        let dir = tempfile::tempdir().expect("tempdir");
        let s = server(dir.path()).await;
        let o = S3Origin::new(S3Config {
            bucket: "nobucket".into(),
            endpoint: Some(s.endpoint()),
            ..S3Config::default()
        })
        .await;
        let e = o.probe().await.expect_err("no bucket");
        assert!(matches!(&e, OriginError::NotFound { what } if what.contains("bucket")), "{e}");
        // SAFETY: as in `credentials`.
        unsafe { std::env::set_var("AWS_SECRET_ACCESS_KEY", "wrong") };
        let o = origin(&s, "").await;
        let e = o.probe().await.expect_err("denied");
        assert!(matches!(e, OriginError::Denied { .. }), "{e}");
    });
}

/// W14: sizes around the parts of an upload come back byte for byte.
#[test]
fn w14_multipart_sizes_come_back() {
    run(async {
        let dir = tempfile::tempdir().expect("tempdir");
        let s = server(dir.path()).await;
        let o = origin(&s, "").await;
        let part = 16 << 20;
        for len in [0, 1, (5 << 20) - 1, 5 << 20, (5 << 20) + 1, 2 * part, 2 * part + 1, 3 * part] {
            let path = dir.path().join("body");
            let data: Bytes = (0..len).map(|i| (i * 7 % 253) as u8).collect::<Vec<_>>().into();
            std::fs::write(&path, &data).expect("write");
            let body = PutBody::File { path, len: len as u64 };
            let meta = o.put(&"k".into(), body, &PutOptions::default()).await.expect("put");
            assert_eq!(meta.size, len as u64);
            assert!(s.store().read("bucket", "k").expect("stored") == data, "{len}");
        }
        let left = std::fs::read_dir(dir.path().join("bucket/.kspeed-s3d")).expect("dir").count();
        assert_eq!(left, 0, "no parts are left behind");
    });
}

/// C7: an object that shrinks while it is streamed fails the stream; no error
/// body becomes content.
#[test]
fn c7_an_object_that_shrinks_while_streamed() {
    run(async {
        let dir = tempfile::tempdir().expect("tempdir");
        let s = server(dir.path()).await;
        let o = patient(Arc::new(origin(&s, "").await));
        s.store().put("bucket", "k", &vec![1; 1_000_000]).expect("put");
        let meta = o.head(&"k".into()).await.expect("head");
        s.store().put("bucket", "k", b"short").expect("put");
        let e = o.get(&meta, 500_000..600_000).await.err().expect("changed");
        assert!(matches!(e, OriginError::Changed { .. }), "{e}");
    });
}
