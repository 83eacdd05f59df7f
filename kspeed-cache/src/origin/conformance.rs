//! The suite that every origin, and every stack of layers, must pass.
//!
//! It works under prefixes of its own, so that it can be pointed at a bucket
//! that holds other things, and it removes what it made.

#![allow(clippy::panic, reason = "a suite's way to say that a promise does not hold")]

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;

use super::{
    Attributes, Condition, ListPage, ListRequest, Origin, OriginError, PutBody, PutOptions, collect,
};
use crate::object::{Key, ObjectMeta};

/// Where origins rightly differ.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traits {
    /// A directory origin: `a` and `a/b` cannot both be objects, `a//b` has no
    /// path.
    pub directories: bool,
    /// The server's HTTP routing knows no control characters in keys (moto).
    pub no_control_characters: bool,
    /// The server takes no If-Match or If-None-Match with a PUT.
    pub no_conditional_puts: bool,
}

/// Runs the whole suite on an object store.
pub async fn run(origin: Arc<dyn Origin>) {
    run_on(origin, Traits::default()).await;
}

/// Runs the whole suite. Panics at the first promise that does not hold.
pub async fn run_on(o: Arc<dyn Origin>, traits: Traits) {
    let base = format!("kspeed-conformance-{:016x}/", rand::random::<u64>());
    bytes_come_back(&*o, &base).await;
    versions_hold(&*o, &base).await;
    listings_are_complete(&*o, &base, traits).await;
    odd_names(&*o, &base, traits).await;
    absent_things(&*o, &base).await;
    if !traits.no_conditional_puts {
        conditions_hold(&*o, &base).await;
    }
    clean(&*o, &base).await;
}

fn key(base: &str, name: &str) -> Key {
    format!("{base}{name}").into()
}

fn pattern(len: usize, salt: u8) -> Bytes {
    (0..len).map(|i| ((i * 31) % 251) as u8 ^ salt).collect::<Vec<_>>().into()
}

async fn put(o: &dyn Origin, k: &Key, b: Bytes) -> ObjectMeta {
    o.put(k, PutBody::Bytes(b), &PutOptions::default())
        .await
        .unwrap_or_else(|e| panic!("put {k}: {e}"))
}

/// Follows all pages of a listing.
pub async fn list_all(o: &dyn Origin, mut r: ListRequest) -> ListPage {
    let mut all = ListPage::default();
    loop {
        let page = o.list(&r).await.unwrap_or_else(|e| panic!("list {r:?}: {e}"));
        if r.max_keys > 0 {
            assert!(page.objects.len() + page.prefixes.len() <= r.max_keys as usize);
        }
        all.objects.extend(page.objects);
        all.prefixes.extend(page.prefixes);
        match page.next {
            Some(t) => r.token = Some(t),
            None => return all,
        }
    }
}

async fn bytes_come_back(o: &dyn Origin, base: &str) {
    for len in [0usize, 1, 4096, 1_000_003] {
        let k = key(base, &format!("bytes/{len}"));
        let data = pattern(len, 0);
        let stored = put(o, &k, data.clone()).await;
        let meta = o.head(&k).await.unwrap_or_else(|e| panic!("head {k}: {e}"));
        assert_eq!(meta.size, len as u64);
        assert_eq!(meta.version, stored.version, "put and head agree on the version");
        assert_eq!(meta.key, k);
        if len == 0 {
            continue;
        }
        let n = len as u64;
        for range in [0..n, 0..1, n - 1..n, n / 3..n / 2 + 1] {
            let body = o.get(&meta, range.clone()).await.unwrap_or_else(|e| panic!("get: {e}"));
            assert_eq!(body.size, n);
            assert_eq!(body.version, meta.version);
            let got = collect(body).await.unwrap_or_else(|e| panic!("body: {e}"));
            assert!(got == data.slice(range.start as usize..range.end as usize), "{k} {range:?}");
        }
        assert!(o.get(&meta, n - 1..n + 1).await.is_err(), "a range past the end is refused");
    }
    let from = o.head(&key(base, "bytes/4096")).await.unwrap_or_else(|e| panic!("head: {e}"));
    let copied = o
        .copy(&from, &key(base, "copy"), &Attributes::default())
        .await
        .unwrap_or_else(|e| panic!("copy: {e}"));
    let got = collect(o.get(&copied, 0..4096).await.unwrap_or_else(|e| panic!("get: {e}"))).await;
    assert_eq!(got.unwrap_or_else(|e| panic!("body: {e}")), pattern(4096, 0));
}

/// A put whose condition does not hold changes nothing, unless what is in its
/// way is its own.
async fn conditions_hold(o: &dyn Origin, base: &str) {
    let k = key(base, "conditional");
    let tried = async |n: u8, condition: Condition, token: &str| {
        let how = PutOptions { condition, token: Some(token.into()), ..PutOptions::default() };
        // Of one size, so that only conditions and tokens can tell them apart.
        o.put(&k, PutBody::Bytes(pattern(1000, n)), &how).await
    };
    let first =
        tried(1, Condition::Absent, "one").await.unwrap_or_else(|e| panic!("new object: {e}"));
    let again = tried(1, Condition::Absent, "one").await;
    let again = again.unwrap_or_else(|e| panic!("its own object is in its way: {e}"));
    assert_eq!(again.version, first.version);
    let refused = |r: Result<ObjectMeta, OriginError>| match r {
        Err(OriginError::Changed { .. } | OriginError::NotFound { .. }) => {}
        r => panic!("a condition that does not hold: {r:?}"),
    };
    refused(tried(2, Condition::Absent, "two").await);
    let second = tried(3, Condition::Version(first.version.clone()), "three").await;
    let second = second.unwrap_or_else(|e| panic!("the version is there: {e}"));
    refused(tried(4, Condition::Version(first.version), "four").await);
    let got = o.get(&second, 0..1000).await.unwrap_or_else(|e| panic!("get: {e}"));
    assert_eq!(collect(got).await.unwrap_or_else(|e| panic!("body: {e}")), pattern(1000, 3));
    o.delete(&k).await.unwrap_or_else(|e| panic!("delete: {e}"));
    refused(tried(5, Condition::Version(second.version), "five").await);
    // Attributes are kept, or are none of the origin's business.
    let how = PutOptions {
        attributes: Attributes {
            mode: Some(0o640),
            mtime_ns: Some(1_500_000_000_000_000_000),
            ..Attributes::default()
        },
        ..PutOptions::default()
    };
    let m = o.put(&k, PutBody::Bytes(pattern(10, 0)), &how).await;
    let m = m.unwrap_or_else(|e| panic!("attributes: {e}"));
    assert!(m.mode.is_none_or(|m| m == 0o640));
    let how = Attributes { mode: Some(0o600), ..Attributes::default() };
    let m = o.copy(&m, &k, &how).await.unwrap_or_else(|e| panic!("copy onto itself: {e}"));
    assert!(m.mode.is_none_or(|m| m == 0o600));
}

async fn versions_hold(o: &dyn Origin, base: &str) {
    let k = key(base, "versioned");
    let old = put(o, &k, pattern(300_000, 1)).await;
    let new = put(o, &k, pattern(300_000, 2)).await;
    assert_ne!(old.version, new.version, "equal sizes, other bytes: another version");
    let mut result = Ok(Bytes::new());
    match o.get(&old, 0..300_000).await {
        Err(e) => result = Err(e),
        Ok(mut body) => {
            while let Some(item) = body.stream.next().await {
                if let Err(e) = item {
                    result = Err(e);
                }
            }
        }
    }
    assert!(
        matches!(result, Err(OriginError::Changed { .. })),
        "the old version is gone, not mixed: {result:?}"
    );
    let got = collect(o.get(&new, 0..300_000).await.unwrap_or_else(|e| panic!("get: {e}"))).await;
    assert_eq!(got.unwrap_or_else(|e| panic!("body: {e}")), pattern(300_000, 2));
}

async fn listings_are_complete(o: &dyn Origin, base: &str, traits: Traits) {
    let mut names: BTreeSet<String> = BTreeSet::new();
    for i in 0..25 {
        names.insert(format!("l/f{i:02}"));
        names.insert(format!("l/d{}/g{i:02}", i % 3));
    }
    names.insert("l/f00-x".into());
    names.insert("l/d0.txt".into());
    if !traits.directories {
        names.insert("l/d1".into());
    }
    for n in &names {
        put(o, &key(base, n), Bytes::from(n.clone())).await;
    }
    for max_keys in [0, 1, 7, 1000] {
        let r = ListRequest {
            prefix: format!("{base}l/").into_bytes(),
            max_keys,
            ..ListRequest::default()
        };
        let flat = list_all(o, r.clone()).await;
        let got: Vec<_> = flat.objects.iter().map(|m| m.key.to_string()).collect();
        let want: Vec<_> = names.iter().map(|n| format!("{base}{n}")).collect();
        assert_eq!(got, want, "flat, {max_keys} a page");
        assert!(
            flat.objects.iter().all(|m| m.size == (m.key.as_bytes().len() - base.len()) as u64)
        );

        let folded = list_all(o, ListRequest { delimited: true, ..r.clone() }).await;
        let got: Vec<_> = folded.prefixes.iter().map(ToString::to_string).collect();
        let want: Vec<_> = (0..3).map(|i| format!("{base}l/d{i}/")).collect();
        assert_eq!(got, want, "folded, {max_keys} a page");
        let got: Vec<_> = folded.objects.iter().map(|m| m.key.to_string()).collect();
        let want: Vec<_> = names
            .iter()
            .filter(|n| !n["l/".len()..].contains('/'))
            .map(|n| format!("{base}{n}"))
            .collect();
        assert_eq!(got, want, "folded, {max_keys} a page");

        let after = key(base, "l/f10");
        let tail = list_all(o, ListRequest { start_after: Some(after.clone()), ..r }).await;
        let got: Vec<_> = tail.objects.iter().map(|m| m.key.to_string()).collect();
        let want: Vec<_> = names
            .iter()
            .map(|n| format!("{base}{n}"))
            .filter(|n| n.as_bytes() > after.as_bytes())
            .collect();
        assert_eq!(got, want, "after f10, {max_keys} a page");
    }
    let part = ListRequest { prefix: format!("{base}l/f0").into_bytes(), ..ListRequest::default() };
    assert_eq!(list_all(o, part).await.objects.len(), 11, "a prefix need not end at a slash");
}

/// N3: names that break URLs, XML or signatures come back byte for byte.
async fn odd_names(o: &dyn Origin, base: &str, traits: Traits) {
    let mut names: Vec<String> = [
        "sp ace",
        "com,ma",
        "pl+us",
        "per%20cent",
        "ha#sh",
        "que?stion",
        "am&p",
        "eq=ual",
        "col:on",
        "quo\"te",
        "apos'trophe",
        "emoji-🦀",
        "accent-e\u{301}",
        "new\nline",
        "ctl-\u{13}",
        "back\\slash",
        "<xml>",
        "tilde~",
        "star*",
        "(paren)",
        "at@",
        "semi;colon",
    ]
    .iter()
    .map(ToString::to_string)
    .collect();
    names.push("n".repeat(255));
    if !traits.directories {
        names.push("n".repeat(256));
        names.push("/lead".into());
        names.push("a//b".into());
    }
    if traits.no_control_characters {
        names.retain(|n| !n.chars().any(char::is_control));
    }
    for n in &names {
        put(o, &key(base, &format!("odd/{n}")), Bytes::from(n.clone())).await;
    }
    let r = ListRequest { prefix: format!("{base}odd/").into_bytes(), ..ListRequest::default() };
    let got: BTreeSet<_> =
        list_all(o, r).await.objects.iter().map(|m| m.key.as_bytes().to_vec()).collect();
    let want: BTreeSet<_> = names.iter().map(|n| format!("{base}odd/{n}").into_bytes()).collect();
    assert_eq!(got, want);
    for n in &names {
        let k = key(base, &format!("odd/{n}"));
        let meta = o.head(&k).await.unwrap_or_else(|e| panic!("head {k}: {e}"));
        let body = o.get(&meta, 0..meta.size).await.unwrap_or_else(|e| panic!("get {k}: {e}"));
        assert_eq!(collect(body).await.unwrap_or_else(|e| panic!("body {k}: {e}")), n.as_bytes());
    }
}

async fn absent_things(o: &dyn Origin, base: &str) {
    let k = key(base, "absent");
    assert!(matches!(o.head(&k).await, Err(OriginError::NotFound { .. })));
    o.delete(&k).await.unwrap_or_else(|e| panic!("deleting nothing: {e}"));
    let r = ListRequest { prefix: format!("{base}absent/").into_bytes(), ..ListRequest::default() };
    assert!(list_all(o, r).await.objects.is_empty());
    let gone = put(o, &key(base, "gone"), Bytes::from_static(b"x")).await;
    o.delete(&gone.key).await.unwrap_or_else(|e| panic!("delete: {e}"));
    assert!(matches!(o.head(&gone.key).await, Err(OriginError::NotFound { .. })));
    assert!(matches!(
        o.get(&gone, 0..1).await.err(),
        Some(OriginError::NotFound { .. } | OriginError::Changed { .. })
    ));
}

async fn clean(o: &dyn Origin, base: &str) {
    let r = ListRequest { prefix: base.as_bytes().to_vec(), ..ListRequest::default() };
    for m in list_all(o, r.clone()).await.objects {
        o.delete(&m.key).await.unwrap_or_else(|e| panic!("delete {}: {e}", m.key));
    }
    assert!(list_all(o, r).await.objects.is_empty());
}
