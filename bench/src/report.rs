//! Results as a table, JSON and a plot.

use serde::Serialize;

/// One result.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What was measured.
    pub name: String,
    /// KSpeed's value.
    pub ours: f64,
    /// What it is held against, and its value.
    pub against: String,
    /// Its value.
    pub reference: f64,
    /// Unit of both.
    pub unit: &'static str,
    /// The ratio, or the value itself where a limit is promised.
    pub score: f64,
    /// What is promised of the score.
    pub promise: Promise,
    /// More that is worth knowing.
    pub note: String,
}

/// A bound on a score.
#[derive(Clone, Copy, Debug, Serialize)]
pub enum Promise {
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
}

impl Row {
    /// A ratio with a lower bound.
    pub fn ratio(
        name: &str,
        ours: f64,
        against: &str,
        reference: f64,
        unit: &'static str,
        least: f64,
    ) -> Self {
        Self {
            name: name.into(),
            ours,
            against: against.into(),
            reference,
            unit,
            score: ours / reference,
            promise: Promise::AtLeast(least),
            note: String::new(),
        }
    }

    /// A value with an upper bound.
    pub fn bounded(name: &str, value: f64, unit: &'static str, most: f64) -> Self {
        Self {
            name: name.into(),
            ours: value,
            against: "limit".into(),
            reference: most,
            unit,
            score: value,
            promise: Promise::AtMost(most),
            note: String::new(),
        }
    }

    pub fn with(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }

    pub fn holds(&self) -> bool {
        match self.promise {
            Promise::AtLeast(p) => self.score >= p,
            Promise::AtMost(p) => self.score <= p,
        }
    }

    pub fn print(&self) {
        let promise = match self.promise {
            Promise::AtLeast(p) => format!(">= {p}"),
            Promise::AtMost(p) => format!("<= {p}"),
        };
        let mark = if self.holds() { "" } else { "  BELOW" };
        println!(
            "{:<58} {:>10.1} {:>10.1} {:<8} {:>7.2}  {promise:<8}{mark}  {} {}",
            self.name, self.ours, self.reference, self.unit, self.score, self.against, self.note
        );
    }
}

/// The table's head.
pub fn head() {
    println!(
        "{:<58} {:>10} {:>10} {:<8} {:>7}  promise",
        "", "KSpeed", "reference", "unit", "score"
    );
}
