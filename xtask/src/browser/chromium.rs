//! A headless Chromium, driven through its DevTools protocol over two pipes.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use xtask_host::{Result, process};

/// The names that distributions give it.
const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
/// For one answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Nothing but the page: no network, nobody's profile, and no sandbox, which root cannot have.
const FLAGS: [&str; 15] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    // A window that nobody sees counts as one in the background, whose timers sleep.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--hide-scrollbars",
    "--window-size=1280,900",
    "--remote-debugging-pipe",
];

/// A running browser with one page.
#[derive(Debug)]
pub(crate) struct Chromium {
    child: Child,
    requests: File,
    messages: Receiver<Value>,
    session: Option<String>,
    next_id: u64,
    /// What the page said that it should not have: errors, exceptions, refused or made requests.
    complaints: Vec<String>,
}

/// The program, if it is installed.
pub(crate) fn find() -> Option<&'static str> {
    NAMES.into_iter().find(|name| process::succeeds(Command::new(name).arg("--version")))
}

impl Chromium {
    /// Starts it with its profile and its pipes in `folder`.
    pub(crate) fn start(program: &str, folder: &Path) -> Result<Self> {
        let (to, from) = (folder.join("to"), folder.join("from"));
        process::run(Command::new("mkfifo").args([&to, &from]))?;
        let flags = FLAGS.join(" ");
        let profile = folder.join("profile");
        // The shell gives the pipes the numbers that Chromium expects them under.
        let script =
            format!("exec {program} {flags} --user-data-dir=\"$3\" about:blank 3<\"$1\" 4>\"$2\"");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script, "sh"]).args([&to, &from, &profile]);
        let child = shell.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        // In the order in which the shell opens them: each waits for its other end.
        let requests = File::options().write(true).open(&to)?;
        let answers = File::open(&from)?;
        let (send, messages) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(answers).split(0).map_while(std::io::Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { return };
                if send.send(message).is_err() {
                    return;
                }
            }
        });
        let mut browser =
            Self { child, requests, messages, session: None, next_id: 0, complaints: Vec::new() };
        let target = json!({ "targetId": browser.first_page()?, "flatten": true });
        let session = browser.call("Target.attachToTarget", target)?;
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(browser)
    }

    /// The page that it opens by itself; a second one would be in the background, where timers are
    /// slow.
    fn first_page(&mut self) -> Result<Value> {
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            let targets = self.call("Target.getTargets", json!({}))?;
            let all = targets["targetInfos"].as_array().map(Vec::as_slice).unwrap_or_default();
            if let Some(page) = all.iter().find(|target| target["type"] == "page") {
                return Ok(page["targetId"].clone());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err("the browser opens no page".into())
    }

    /// Requests something and waits for the answer.
    pub(crate) fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.next_id += 1;
        let mut request = json!({ "id": self.next_id, "method": method, "params": params });
        if let Some(session) = &self.session {
            request["sessionId"] = json!(session);
        }
        self.requests.write_all(format!("{request}\0").as_bytes())?;
        loop {
            let message = self
                .messages
                .recv_timeout(PATIENCE)
                .map_err(|error| format!("{method}: no answer: {error}"))?;
            if message["id"] != self.next_id {
                self.hear(&message);
                continue;
            }
            if !message["error"].is_null() {
                return Err(format!("{method}: {}", message["error"]).into());
            }
            return Ok(message["result"].clone());
        }
    }

    fn hear(&mut self, event: &Value) {
        let params = &event["params"];
        let complaint = match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => params["exceptionDetails"].to_string(),
            Some("Runtime.consoleAPICalled") => params["args"].to_string(),
            Some("Log.entryAdded") => params["entry"]["text"].to_string(),
            Some("Network.requestWillBeSent") if params["type"] != "Document" => {
                format!("requested {}", params["request"]["url"])
            }
            _ => return,
        };
        self.complaints.push(complaint);
    }

    /// Opens a page and waits until its script has run.
    pub(crate) fn open(&mut self, page: &Path) -> Result {
        let url = format!("file://{}", page.canonicalize()?.display());
        self.call("Page.navigate", json!({ "url": "about:blank" }))?;
        self.call("Page.navigate", json!({ "url": url }))?;
        let begin = Instant::now();
        let ready = "Boolean(document.documentElement) \
                     && 'ready' in document.documentElement.dataset";
        while self.eval(ready)? != true {
            if begin.elapsed() > PATIENCE {
                let said = self.complaints.join("; ");
                return Err(format!("{url} does not get ready; it said: {said}").into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The value of an expression in the page, once it is settled.
    pub(crate) fn eval(&mut self, expression: &str) -> Result<Value> {
        let params =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.call("Runtime.evaluate", params)?;
        if !answer["exceptionDetails"].is_null() {
            return Err(format!("{expression}\n{}", answer["exceptionDetails"]).into());
        }
        Ok(answer["result"]["value"].clone())
    }

    /// What was heard since the last time.
    pub(crate) fn complaints(&mut self) -> Vec<String> {
        std::mem::take(&mut self.complaints)
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        // One that has ended already cannot be killed; there is nothing to do about it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
