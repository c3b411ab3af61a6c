/** A table that stays smooth with thousands of rows: sorted by TanStack Table, virtualized by TanStack Virtual. */

import { createSortedRowModel, rowSortingFeature, tableFeatures, useTable, type ColumnDef } from "@tanstack/react-table";
import { useVirtualizer } from "@tanstack/react-virtual";
import { ArrowDown, ArrowUp } from "lucide-react";
import { useEffect, useMemo, useRef, type ReactNode } from "react";

import { useNarrow } from "./narrow";
import { useMovingRows } from "./movingRows";

export interface Column<T> {
  id: string;
  header: string;
  /** Sort key. Without it the column is not sortable. */
  value?: (row: T) => string | number | null;
  /** Cell content; by default the value as text. */
  cell?: (row: T) => ReactNode;
  align?: "left" | "right";
  /** On a phone, where a row is a card: full width, not truncated. */
  wide?: boolean;
  /** A CSS grid track: "120px", "minmax(8rem, 2fr)". Default "minmax(6rem, 1fr)". */
  width?: string;
}

interface Props<T> {
  label: string;
  rows: readonly T[];
  columns: readonly Column<T>[];
  rowId: (row: T) => string;
  /** Column id, with "-" before it for descending. Lives in the URL, so the view owns it. */
  sort?: string | undefined;
  onSort?: (sort: string | undefined) => void;
  selected?: string | null | undefined;
  onOpen?: (row: T) => void;
  /** Shown when there are no rows. */
  empty: ReactNode;
  /** Height of the scrolling body, or "fill" for the remaining space of the flex parent. */
  height?: number | "fill";
  rowHeight?: number;
  /** Extra class for a row. */
  rowClass?: (row: T) => string;
}

/** Estimated height of a card on a phone; measured when drawn. */
const CARD_PX = 120;

/** Card text wraps instead of being truncated. */
const CARD_CELL = "flex items-baseline gap-2 break-words [&_.truncate]:whitespace-normal [&_time]:whitespace-normal [&>*:last-child]:min-w-0";

const features = tableFeatures({ rowSortingFeature, sortedRowModel: createSortedRowModel() });

function compare(a: unknown, b: unknown): number {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

export function Table<T extends object>(props: Props<T>) {
  const { columns, rows, rowId, sort, rowHeight = 40, height = "fill" } = props;
  const definitions = useMemo<ColumnDef<typeof features, T>[]>(
    () =>
      columns.map((column) => ({
        id: column.id,
        accessorFn: (row: T) => column.value?.(row) ?? null,
        enableSorting: column.value !== undefined,
        sortFn: (a, b, id) => compare(a.getValue(id), b.getValue(id)),
      })),
    [columns],
  );
  const sorting = useMemo(() => {
    if (!sort) return [];
    const desc = sort.startsWith("-");
    return [{ id: desc ? sort.slice(1) : sort, desc }];
  }, [sort]);
  const table = useTable({ features, columns: definitions, data: rows as T[], state: { sorting }, getRowId: rowId });
  const sorted = table.getRowModel().rows;

  const scroller = useRef<HTMLDivElement>(null);
  const narrow = useNarrow();
  const moving = useMovingRows();
  const virtual = useVirtualizer({ count: sorted.length, getScrollElement: () => scroller.current, estimateSize: () => (narrow ? CARD_PX : rowHeight), overscan: 12 });
  useEffect(() => virtual.measure(), [narrow, virtual]);
  const selectedIndex = props.selected ? sorted.findIndex((row) => row.id === props.selected) : -1;
  useEffect(() => {
    if (selectedIndex >= 0) virtual.scrollToIndex(selectedIndex, { align: "auto" });
  }, [selectedIndex, virtual]);

  // Columns without a header hold controls.
  const title = columns.find((column) => column.header !== "");
  const template = columns.map((column) => column.width ?? "minmax(6rem, 1fr)").join(" ");
  const toggle = (column: Column<T>) => {
    if (!column.value || !props.onSort) return;
    props.onSort(sort === column.id ? `-${column.id}` : sort === `-${column.id}` ? undefined : column.id);
  };
  const move = (from: number, by: number) => {
    const next = Math.min(sorted.length - 1, Math.max(0, from + by));
    virtual.scrollToIndex(next);
    requestAnimationFrame(() => scroller.current?.querySelector<HTMLElement>(`[data-index="${next}"]`)?.focus());
  };

  return (
    <div
      ref={scroller}
      role="table"
      aria-label={props.label}
      aria-rowcount={sorted.length + 1}
      data-rows
      tabIndex={-1}
      className={`relative overflow-auto ${height === "fill" ? "min-h-0 flex-1" : ""}`}
      style={height === "fill" ? undefined : { maxHeight: height }}
    >
      <div role="rowgroup" className={narrow ? "sr-only" : "sticky top-0 z-10 min-w-fit border-b bg-surface"}>
        <div role="row" className="grid min-w-fit items-center px-2" style={{ gridTemplateColumns: template }}>
          {columns.map((column) => {
            const direction = sort === column.id ? "ascending" : sort === `-${column.id}` ? "descending" : undefined;
            const look = `flex h-9 w-full items-center gap-1 px-2 text-sm font-medium text-muted ${column.align === "right" ? "justify-end" : ""}`;
            return (
              <div key={column.id} role="columnheader" aria-sort={direction} className="min-w-0">
                {column.value && props.onSort ? (
                  <button type="button" className={`${look} hover:text-ink`} onClick={() => toggle(column)}>
                    <span className="truncate">{column.header}</span>
                    {direction === "ascending" && <ArrowUp aria-hidden className="size-3.5 shrink-0" />}
                    {direction === "descending" && <ArrowDown aria-hidden className="size-3.5 shrink-0" />}
                  </button>
                ) : (
                  <span className={look}><span className="truncate">{column.header}</span></span>
                )}
              </div>
            );
          })}
        </div>
      </div>
      {sorted.length === 0 ? (
        props.empty
      ) : (
        <div {...moving} role="rowgroup" className={`relative ${narrow ? "" : "min-w-fit"}`} style={{ height: virtual.getTotalSize() }}>
          {virtual.getVirtualItems().map((item) => {
            const row = sorted[item.index];
            if (!row) return null;
            const isSelected = row.id === props.selected;
            return (
              <div
                key={row.id}
                role="row"
                aria-rowindex={item.index + 2}
                data-index={item.index}
                data-row
                ref={narrow ? virtual.measureElement : undefined}
                tabIndex={props.onOpen ? 0 : -1}
                onClick={() => props.onOpen?.(row.original)}
                onKeyDown={(event) => {
                  if (event.target !== event.currentTarget) return;
                  if (event.key === "Enter") props.onOpen?.(row.original);
                  else if (event.key === "ArrowDown") move(item.index, 1);
                  else if (event.key === "ArrowUp") move(item.index, -1);
                  else return;
                  event.preventDefault();
                }}
                className={`absolute inset-x-0 border-b border-line/60 px-2 focus-visible:-outline-offset-2 ${narrow ? "grid grid-cols-2 gap-x-2 gap-y-1 py-2.5" : "grid min-w-fit items-center"} ${props.onOpen ? "cursor-pointer hover:bg-hover" : ""} ${isSelected ? "bg-accent-soft" : ""} ${props.rowClass?.(row.original) ?? ""}`}
                style={{ transform: `translateY(${item.start}px)`, ...(narrow ? {} : { gridTemplateColumns: template, height: item.size }) }}
              >
                {columns.map((column) => (
                  <div key={column.id} role="cell" className={`min-w-0 px-2 ${narrow ? (column.header === "" ? "absolute top-2 right-1" : `${CARD_CELL} ${column === title ? "col-span-2 pr-8 font-medium" : column.wide ? "col-span-2" : ""}`) : `truncate ${column.align === "right" ? "text-right" : ""}`}`}>
                    {narrow && column !== title && column.header !== "" && !column.wide && <span aria-hidden className="shrink-0 text-sm text-muted">{column.header}</span>}
                    {column.cell ? column.cell(row.original) : <span className="foreign">{column.value?.(row.original) ?? "–"}</span>}
                  </div>
                ))}
              </div>
            );
          })}
        </div>
      )}
    </div>
  );
}
