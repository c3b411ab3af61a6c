/** A line without axes, for a card. */
export function Sparkline(props: { values: readonly (number | null)[]; color?: string; label: string }) {
  const known = props.values.filter((v): v is number => v !== null);
  if (known.length < 2) return <p className="h-7 text-sm text-faint">{known.length === 0 ? "no data yet" : ""}</p>;
  const low = Math.min(...known, 0);
  const high = Math.max(...known);
  const span = high - low || 1;
  const step = 100 / (props.values.length - 1);
  let path = "";
  let pen = false;
  props.values.forEach((value, i) => {
    if (value === null) {
      pen = false;
      return;
    }
    path += `${pen ? "L" : "M"}${(i * step).toFixed(2)} ${(26 - ((value - low) / span) * 24).toFixed(2)}`;
    pen = true;
  });
  return (
    <svg role="img" aria-label={props.label} viewBox="0 0 100 28" preserveAspectRatio="none" className="h-7 w-full">
      <path d={path} fill="none" stroke={`var(--color-${props.color ?? "accent"})`} strokeWidth="1.5" vectorEffect="non-scaling-stroke" strokeLinejoin="round" />
    </svg>
  );
}
