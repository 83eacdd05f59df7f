//! The single flight under shuttle, which explores interleavings of its lock:
//! leaders that fail, vanish or succeed, followers that give up.

#[path = "../src/flight.rs"]
#[allow(dead_code)]
mod flight;

/// The same lock with shuttle inside.
mod sync {
    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(t: T) -> Self {
            Self(shuttle::sync::Mutex::new(t))
        }

        pub fn lock(&self) -> shuttle::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
        }
    }
}

use std::sync::Arc;

use flight::{Claim, Flights, Outcome};
use std::sync::atomic::{AtomicUsize, Ordering};

type F = Flights<u32, u32, &'static str>;

/// Readers that claim until they hold the value; leaders fail, vanish or
/// succeed by turns. Explored over many schedules: no reader is lost, no
/// two lead at once, and nothing stays behind.
#[test]
fn every_reader_gets_an_answer_under_any_schedule() {
    shuttle::check_random(
        || {
            let flights = Arc::new(F::new());
            let leading = Arc::new(AtomicUsize::new(0));
            let fetches = Arc::new(AtomicUsize::new(0));
            let readers: Vec<_> = (0..4)
                .map(|n| {
                    let (flights, leading, fetches) =
                        (flights.clone(), leading.clone(), fetches.clone());
                    shuttle::thread::spawn(move || {
                        loop {
                            match flights.claim(&7) {
                                Claim::Lead(lead) => {
                                    assert_eq!(leading.fetch_add(1, Ordering::SeqCst), 0);
                                    shuttle::thread::yield_now();
                                    let turn = fetches.fetch_add(1, Ordering::SeqCst);
                                    leading.fetch_sub(1, Ordering::SeqCst);
                                    match turn {
                                        0 => drop(lead),
                                        1 => lead.finish(Err("no")),
                                        _ => {
                                            lead.finish(Ok(42));
                                            return 42;
                                        }
                                    }
                                }
                                Claim::Follow(wait) if n == 3 => drop(wait),
                                Claim::Follow(wait) => {
                                    match shuttle::future::block_on(wait.outcome()) {
                                        Outcome::Done(v) => return v,
                                        Outcome::Failed(_) | Outcome::Abandoned => {}
                                    }
                                }
                            }
                            shuttle::thread::yield_now();
                        }
                    })
                })
                .collect();
            for r in readers {
                assert_eq!(r.join().ok(), Some(42));
            }
            assert!(flights.is_empty());
        },
        2_000,
    );
}

#[test]
fn a_second_leader_is_refused_until_the_first_lands() {
    shuttle::check_random(
        || {
            let f = F::new();
            let lead = f.lead(&1);
            assert!(f.lead(&1).is_none());
            drop(lead);
            assert!(f.lead(&1).is_some());
        },
        10,
    );
}
