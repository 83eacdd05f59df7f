//! Shuffled epochs on a real mount: recovered, told, and wrong.

mod common;

use std::fs;
use std::time::Duration;

use common::{Mount, World, pattern, wait_until};
use kspeed_fs::control::{Client, HintRequest};
use kspeed_fs::dataset::Told;
use kspeed_prefetch::order::{Recipe, Shuffle};

const FILES: u32 = 600;
const CLASSES: u32 = 10;
const BYTES: usize = 2000;

/// An image folder with a label beside each image, and other things around it.
fn image_folder(w: &World) -> Vec<String> {
    let mut files = Vec::new();
    for i in 0..FILES {
        let name = format!("train/class{:02}/{:04}", i * CLASSES / FILES, i);
        w.put(&format!("{name}.JPEG"), pattern(BYTES, i));
        w.put(&format!("{name}.json"), b"{}");
        files.push(format!("{name}.JPEG"));
    }
    w.put("train.csv", b"a,b");
    w.put("val/x.JPEG", b"x");
    files
}

fn order(seed: u64, epoch: u64) -> Vec<u32> {
    let recipe = Recipe::SeedPlusEpoch { shuffle: Shuffle::Torch, seed };
    recipe.order(FILES, epoch).expect("known")
}

fn read(m: &Mount, files: &[String], order: &[u32]) {
    for i in order {
        let got = m.read(&files[*i as usize]).expect("read");
        assert!(got == pattern(BYTES, *i), "{}", files[*i as usize]);
        // A trainer does something too.
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn predictors(m: &Mount) -> Vec<String> {
    let status = m.status();
    let datasets = status["mounts"][0]["datasets"].as_array().expect("datasets");
    datasets.iter().map(|d| d["predictor"].as_str().expect("text").to_owned()).collect()
}

#[test]
fn a_likely_seed_is_found_and_its_epochs_are_fetched_ahead() {
    for args in [&["--read-only"][..], &["--read-only", "--snapshot"], &[]] {
        let w = World::new();
        let files = image_folder(&w);
        let m = w.mount(args);
        read(&m, &files, &order(42, 0)[..300]);
        wait_until("an order", || predictors(&m) == ["torch.randperm, seed 42 + epoch, epoch 0"]);
        wait_until("fetched", || w.gets() >= u64::from(FILES));
        read(&m, &files, &order(42, 0)[300..]);
        assert!(w.gets() <= u64::from(FILES) + 5, "{args:?}: {} GETs", w.gets());
        let (reads, ready) = (m.counter("predicted_reads"), m.counter("predicted_ready"));
        assert!(reads >= 200 && ready * 100 >= reads * 90, "{args:?}: {ready} of {reads}");
        assert!(m.umount().success());
    }
}

#[test]
fn a_told_order_is_there_before_it_is_read() {
    let w = World::new();
    let files = image_folder(&w);
    let m = w.mount(&["--read-only"]);
    let order = Shuffle::Python.permutation(FILES, 1 << 40);
    let client = Client::of_mount(&m.mnt).expect("client");
    let hint = |files: &[String], told: Told| {
        let r = HintRequest {
            mountpoint: m.mnt.clone(),
            id: "job".into(),
            files: files.to_vec(),
            told,
        };
        w.runtime.block_on(client.hint(&r))
    };
    assert_eq!(hint(&files, Told::Order(order.clone())).expect("hint").known, FILES as usize);
    wait_until("fetched", || w.gets() == u64::from(FILES));
    read(&m, &files, &order);
    assert_eq!(w.gets(), u64::from(FILES));
    // Another takes its place.
    let told = Told::Seed { seed: 7, epoch: 2 };
    assert_eq!(hint(&files, told).expect("hint").known, FILES as usize);
    assert_eq!(predictors(&m), ["torch.randperm, seed 7 + epoch, epoch 2"]);
    let e = hint(&["nowhere/a".into()], Told::Order(vec![0])).expect_err("no such directory");
    assert!(e.to_string().contains("no such"), "{e}");
}

#[test]
fn a_hint_is_refused_where_orders_are_not_followed() {
    let w = World::new();
    w.put("a", b"x");
    let m = w.mount(&["--predict", "off"]);
    let client = Client::of_mount(&m.mnt).expect("client");
    let r = HintRequest {
        mountpoint: m.mnt.clone(),
        id: String::new(),
        files: vec!["a".into()],
        told: Told::Order(vec![0]),
    };
    let e = w.runtime.block_on(client.hint(&r)).expect_err("refused");
    assert!(e.to_string().contains("--predict off"), "{e}");
    assert_eq!(predictors(&m), Vec::<String>::new());
}

#[test]
fn an_order_that_changes_is_harmless() {
    let w = World::new();
    let files = image_folder(&w);
    let m = w.mount(&["--read-only"]);
    read(&m, &files, &order(1, 0)[..100]);
    wait_until("an order", || predictors(&m) == ["torch.randperm, seed 1 + epoch, epoch 0"]);
    // Another seed from here on, then names that are gone.
    read(&m, &files, &Shuffle::Python.permutation(FILES, 99));
    read(&m, &files, &order(3, 0));
    let gets = w.gets();
    assert!(gets <= u64::from(FILES) + 10, "each file once, whoever wanted it: {gets}");
    fs::remove_dir_all(m.path("gone")).expect_err("read-only");
    assert!(m.umount().success());
}

#[test]
fn the_daemon_ends_while_it_searches() {
    let w = World::new();
    let files = image_folder(&w);
    let m = w.mount(&["--read-only"]);
    // No seed explains it: all are scanned.
    read(&m, &files, &Shuffle::Python.permutation(FILES, 1 << 50));
    assert!(m.umount().success());
    assert!(!w.log().contains("tasks live on"));
}
