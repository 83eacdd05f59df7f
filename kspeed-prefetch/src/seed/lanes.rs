//! The inner loop of the scan: many seeds side by side, one in each lane of the
//! widest vectors that the processor has.
//!
//! The code is plain arrays; the compiler makes vectors of it, once for each
//! instruction set. Choosing one at run time is this module's only `unsafe`.

use crate::order::{M, SEED_MULTIPLIER, temper, twist};

/// Seeds side by side: four vectors of AVX-512, so that one's latency is hidden
/// behind the others.
pub(super) const LANES: usize = 64;
/// Outputs of each seed that are looked at.
pub(super) const OUTPUTS: usize = 16;

/// Division by a number that is known beforehand: the quotient is estimated from
/// below by one at the most.
#[derive(Clone, Copy)]
pub(super) struct Divisor {
    by: u32,
    reciprocal: u64,
}

impl Divisor {
    pub(super) fn new(by: u32) -> Self {
        Self { by, reciprocal: (1u64 << 32) / u64::from(by) }
    }

    #[inline(always)]
    fn remainder(self, v: u32) -> u32 {
        let q = ((u64::from(v) * self.reciprocal) >> 32) as u32;
        let r = v.wrapping_sub(q.wrapping_mul(self.by));
        r.min(r.wrapping_sub(self.by))
    }
}

#[inline(always)]
fn hits_body(first: u32, divisors: &[Divisor; OUTPUTS], bits: &[u32]) -> [u32; LANES] {
    let mut x = [0u32; LANES];
    for (l, v) in x.iter_mut().enumerate() {
        *v = first.wrapping_add(l as u32);
    }
    let mut low = [[0u32; LANES]; OUTPUTS + 1];
    low[0] = x;
    for (i, l) in low.iter_mut().enumerate().skip(1) {
        step(&mut x, i as u32);
        *l = x;
    }
    for i in OUTPUTS + 1..M {
        step(&mut x, i as u32);
    }
    let mut hits = [0u32; LANES];
    for (j, d) in divisors.iter().enumerate() {
        step(&mut x, (M + j) as u32);
        // Of the first outputs hardly one meets a place that an earlier one has
        // swapped: the sample is the place.
        let mut samples = [0u32; LANES];
        for l in 0..LANES {
            let z = temper(twist(low[j][l], low[j + 1][l], x[l]));
            samples[l] = d.remainder(z) + j as u32;
        }
        // Apart, so that what is above becomes vectors.
        for (h, s) in hits.iter_mut().zip(samples) {
            *h += bits.get(s as usize / 32).map_or(0, |w| (w >> (s % 32)) & 1);
        }
    }
    hits
}

/// The fourth output of each seed.
#[inline(always)]
fn fourth_body(first: u32) -> [u32; LANES] {
    let mut x = [0u32; LANES];
    for (l, v) in x.iter_mut().enumerate() {
        *v = first.wrapping_add(l as u32);
    }
    let mut at = [[0u32; LANES]; 2];
    for i in 1..M + 4 {
        step(&mut x, i as u32);
        match i {
            3 => at[0] = x,
            4 => at[1] = x,
            _ => {}
        }
    }
    let mut out = [0u32; LANES];
    for l in 0..LANES {
        out[l] = temper(twist(at[0][l], at[1][l], x[l]));
    }
    out
}

#[inline(always)]
fn step(x: &mut [u32; LANES], i: u32) {
    for v in x.iter_mut() {
        *v = SEED_MULTIPLIER.wrapping_mul(*v ^ (*v >> 30)).wrapping_add(i);
    }
}

macro_rules! by_processor {
    ($name:ident, $body:ident, ($($arg:ident: $ty:ty),*), $out:ty) => {
        pub(super) fn $name($($arg: $ty),*) -> $out {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($arg: $ty),*) -> $out {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $ty),*) -> $out {
                    $body($($arg),*)
                }
                if is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    // SAFETY: the processor has what the function is compiled for.
                    return unsafe { avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: as above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            $body($($arg),*)
        }
    };
}

by_processor!(
    hits,
    hits_body,
    (first: u32, divisors: &[Divisor; OUTPUTS], bits: &[u32]),
    [u32; LANES]
);
by_processor!(fourth, fourth_body, (first: u32), [u32; LANES]);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Mt19937;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lanes_are_the_generators(first: u32, n in 64u32..5_000_000, mark: u32) {
            let divisors = std::array::from_fn(|i| Divisor::new(n - i as u32));
            let bits: Vec<u32> =
                (0..n.div_ceil(32)).map(|i| i.wrapping_mul(0x9e37_79b9) ^ mark).collect();
            let ours = hits(first, &divisors, &bits);
            let fourths = fourth(first);
            for l in 0..LANES {
                let mut g = Mt19937::new(first.wrapping_add(l as u32));
                let mut expected = 0;
                for i in 0..OUTPUTS as u32 {
                    let z = g.next_u32();
                    if i == 3 {
                        prop_assert_eq!(z, fourths[l]);
                    }
                    let s = i + z % (n - i);
                    expected += (bits[s as usize / 32] >> (s % 32)) & 1;
                }
                prop_assert_eq!(ours[l], expected);
            }
        }
    }
}
