//! Limits of processes and threads, which runtimes answer with a panic.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use crate::failure::{Exit, Failure};

/// Texts of the panics of a runtime, and of the standard library, that gets no thread.
const TEXTS: &[&str] = &["can't spawn worker thread", "failed to spawn thread"];

/// Runs a command, of which a panic for want of threads is an error.
pub(crate) fn caught(work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !is_limit(info.payload()) {
                before(info);
            }
        }));
    });
    match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(payload) if is_limit(&*payload) => {
            Err(Failure::new(Exit::Io, "the system starts no more threads").hint(
                "raise the limit of processes of this user: ulimit -u, or that of the container",
            ))
        }
        Err(payload) => panic::resume_unwind(payload),
    }
}

fn is_limit(payload: &(dyn Any + Send)) -> bool {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or_default();
    TEXTS.iter().any(|known| text.contains(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_for_want_of_threads_is_an_error_and_no_other_panic_is() {
        let limited = caught(|| panic!("OS can't spawn worker thread: {}", "EAGAIN"));
        assert!(limited.unwrap_err().to_message().contains("no more threads"));
        let other = panic::catch_unwind(|| drop(caught(|| panic!("another"))));
        assert!(other.is_err());
        assert!(caught(|| Ok(())).is_ok());
    }
}
