//! Waiting callers that get a signal stop waiting.
//!
//! The FUSE library answers INTERRUPT requests with ENOSYS, upon which the kernel
//! sends none and lets even a killed caller wait for its reply. So a call that
//! waits looks for itself, four times a second, whether its caller has a signal
//! pending that ends or interrupts it.

use std::time::Duration;

/// Calls shorter than this never look.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// SIGHUP, SIGINT, SIGQUIT, SIGKILL, SIGTERM as bits of /proc's masks.
const ENDING: u64 = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 8 | 1 << 14;

/// Returns when the thread has an ending signal pending, or is gone.
pub(super) async fn signalled(tid: u32) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        // 0: the kernel itself, or a process of another pid namespace.
        if tid != 0 && is_signalled(tid) {
            return;
        }
    }
}

fn is_signalled(tid: u32) -> bool {
    let Ok(text) = std::fs::read_to_string(format!("/proc/{tid}/status")) else {
        return false;
    };
    let mask = |name: &str| -> u64 {
        text.lines()
            .find_map(|l| l.strip_prefix(name))
            .and_then(|v| u64::from_str_radix(v.trim(), 16).ok())
            .unwrap_or(0)
    };
    let pending = mask("SigPnd:") | mask("ShdPnd:");
    pending & ENDING & !(mask("SigBlk:") | mask("SigIgn:")) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_signals_is_not_signalled() {
        assert!(!is_signalled(std::process::id()));
        assert!(!is_signalled(u32::MAX));
    }
}
